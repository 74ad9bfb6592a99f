import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Page } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { runPython } from "../support.js";
import { DESK, PHONE, Site, until } from "./site.js";

let site: Site;
beforeAll(async () => {
  site = await Site.open();
});
afterAll(() => site?.close());

const number = async (page: Page, id: string) => parseFloat((await page.locator(`#${id}`).innerText()).replace(",", ""));
const steps = (page: Page, wanted: number) =>
  page.waitForFunction((n) => Number(document.querySelector("#steps")!.textContent) >= n, wanted);
const typed = (page: Page) => page.evaluate(() => document.querySelector("#typed")!.textContent!);

test("trains on a text automatically; pause, resume and download the model", async () => {
  const { page, pageErrors, close } = await site.page("write/", { ...DESK, acceptDownloads: true });
  await until(page, "Training on wasm.");
  await steps(page, 25);
  await page.getByRole("button", { name: "Pause" }).click();
  // While paused, status, metrics and generated text belong to the same step.
  await until(page, "Paused after ");
  const last = await number(page, "loss");
  expect(await page.locator("#status").innerText()).toContain(`after ${await number(page, "steps")} steps`);
  expect(last).toBeLessThan(Math.log(128) - 0.5); // at first all characters are equally likely
  expect(await number(page, "choices")).toBeCloseTo(Math.exp(last), -1);
  expect((await typed(page)).length).toBeGreaterThan(90);
  const kept = await page.locator("#samples li").allInnerTexts();
  expect(kept.map((k) => k.split("\n")[0]).slice(0, 2)).toEqual(["first step", "25 steps"]);
  const still = await typed(page);

  const [model] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download .onnx" }).click()]);
  expect(model.suggestedFilename()).toBe("writer.onnx");
  await page.getByText("Show the code").click();
  expect(await page.locator(".code-panel code").innerText()).toContain("trainer.learningRate = 0.003;");
  const [characters] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download characters.json" }).click()]);
  await model.saveAs(join(site.folder, "writer.onnx"));
  await characters.saveAs(join(site.folder, "characters.json"));
  const names = JSON.parse(readFileSync(join(site.folder, "characters.json"), "utf8")) as string[];
  expect(names[1]).toBe(" ");
  // The file contains the trained weights; the page shows a moving average of the loss, which lags a little.
  const loss = runPython(
    `
import json, sys, numpy as np, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
names = json.load(open(sys.argv[2]))
text = open(sys.argv[3]).read()
numbers = np.array([names.index(c) for c in text])
rows = np.stack([numbers[i : i + 64] for i in range(0, len(numbers) - 64, 64)])
(logits,) = session.run(None, {"ids": rows})
chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
print(-np.take_along_axis(chances[:, :-1], rows[:, 1:, None], -1).mean())
`,
    join(site.folder, "writer.onnx"), join(site.folder, "characters.json"), new URL("../../../../site/src/write/sonnets.txt", import.meta.url).pathname,
  );
  expect(parseFloat(loss)).toBeLessThan(last + 0.2);
  expect(parseFloat(loss)).toBeGreaterThan(last - 1.2);
  expect(await typed(page)).toBe(still);
  await page.getByRole("button", { name: "Resume" }).click();
  await page.waitForFunction((previous) => document.querySelector("#typed")!.textContent !== previous, still);
  expect(pageErrors).toEqual([]);
  await close();
});

test("a link restores settings and text, and a text that is too short is rejected, on a phone", async () => {
  const text = "the cat sat on the mat and the rat sat on the hat. ".repeat(8);
  const { page, pageErrors, close } = await site.page(`write/#${new URLSearchParams({ temperature: "0.3", rate: "0.01", begin: "the ", text })}`, PHONE);
  await steps(page, 5);
  await page.getByRole("button", { name: "Pause" }).tap();
  await until(page, "Paused after ");
  expect(await page.getByLabel("Temperature").inputValue()).toBe("0.3");
  expect(await page.getByLabel("Learning rate").inputValue()).toBe("0.01");
  expect(await page.locator("#source").inputValue()).toBe(text);
  expect(await page.locator("#about-source").innerText()).toContain(`${text.length} characters, ${new Set(text).size} of them distinct`);
  expect(await typed(page)).toMatch(/^the /);
  expect(new Set(await typed(page)).size).toBeLessThanOrEqual(new Set(text).size);
  await page.getByLabel("Learning rate").selectOption("0.001");
  await page.getByLabel("include the text").check();
  await page.getByRole("button", { name: "Copy link" }).tap();
  await expect.poll(() => page.url()).toContain("rate=0.001");
  expect(new URLSearchParams(new URL(page.url()).hash.slice(1)).get("text")).toBe(text);
  await page.locator("#source").fill("too short");
  await until(page, "The text must have more than 64 characters, got 9. The model keeps the previous text.");
  expect(await page.getByRole("button", { name: "Train on this text" }).isDisabled()).toBe(true);
  await page.locator("#source").fill("");
  await until(page, "The text must have more than 64 characters, got 0.");
  // The previous run can continue with its own text.
  const still = await typed(page);
  await page.getByRole("button", { name: "Resume" }).tap();
  await page.waitForFunction((previous) => document.querySelector("#typed")!.textContent !== previous, still);
  await page.getByRole("button", { name: "Shakespeare's sonnets" }).tap();
  await page.evaluate(() => (document.querySelector("#status")!.textContent = ""));
  await page.getByRole("button", { name: "Train on this text" }).tap();
  await until(page, "Training on wasm.");
  expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(390);
  expect(pageErrors).toEqual([]);
  await close();
});
