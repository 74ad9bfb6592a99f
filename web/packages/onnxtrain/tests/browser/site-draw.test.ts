import { readFileSync } from "node:fs";
import { join } from "node:path";
import type { Page } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { runPython } from "../support.js";
import { DESK, interrupt, PHONE, Site, SITE, until } from "./site.js";

let site: Site;

beforeAll(async () => {
  site = await Site.open();
});
afterAll(() => site?.close());

const accuracy = async (page: Page) => parseFloat(await page.locator("#accuracy").innerText());
const shares = (page: Page) => page.locator("#bars .share").allInnerTexts();
const drawn = (page: Page) => page.waitForFunction(() => [...document.querySelectorAll("#bars .share")].every((s) => s.textContent !== ""));

/** Draws lines through places of the pad, given as shares of its sides. */
async function draw(page: Page, ...strokes: (readonly [number, number])[][]): Promise<void> {
  await page.locator("#pad").scrollIntoViewIfNeeded();
  const box = (await page.locator("#pad").boundingBox())!;
  for (const [first, ...rest] of strokes) {
    await page.mouse.move(box.x + first![0] * box.width, box.y + first![1] * box.height);
    await page.mouse.down();
    for (const [x, y] of rest) await page.mouse.move(box.x + x * box.width, box.y + y * box.height, { steps: 5 });
    await page.mouse.up();
  }
}

/** Opens the settings and stops what began by itself. */
async function settle(page: Page, settings: Record<string, string>): Promise<void> {
  await interrupt(page, "stop");
  await until(page, "Stopped");
  if (!(await page.getByLabel("Pace").isVisible())) await page.locator(".training summary").click();
  await page.getByLabel("Pace").selectOption("0");
  for (const [name, value] of Object.entries(settings)) await page.getByLabel(name).fill(value);
}
const train = (page: Page) => page.getByRole("button", { name: "Train anew" }).click();

test("it learns by itself; a person pauses, draws, saves, comes back and takes the model along", async () => {
  const { page, complaints, close } = await site.page("draw/", { ...DESK, acceptDownloads: true });
  await interrupt(page, "pause");
  await until(page, "Paused");
  // Below 3 s on a machine that does nothing else; this one may be busy.
  await page.waitForFunction(() => document.querySelector<HTMLElement>("#status")!.dataset["first"] !== undefined);
  console.log(`from the start to the first step: ${await page.locator("#status").getAttribute("data-first")} s`);
  const loss = await page.locator("#loss").innerText();
  await draw(page, [[0.5, 0.1], [0.5, 0.9]]);
  await drawn(page);
  expect(await page.locator("#verdict").innerText()).toMatch(/^(This is|Probably|Perhaps) a \d$/);
  expect(await page.locator("#loss").innerText()).toBe(loss);
  await page.getByRole("button", { name: "Clear" }).click();
  await expect.poll(() => shares(page)).toEqual(Array(10).fill(""));
  await page.getByRole("button", { name: "Resume" }).click();
  await settle(page, { Epochs: "10" });
  await train(page);
  await until(page, "Done: 450 steps");
  expect(await accuracy(page)).toBeGreaterThan(90);
  expect(await page.locator("#grid .right").count()).toBeGreaterThan(24);
  expect(await page.locator("#tiles canvas").count()).toBe(64);
  // All test digits are in the table, most of them on its diagonal.
  const table = await page.locator("#confusion tbody tr").evaluateAll((rows) => rows.map((r) => [...r.querySelectorAll("td")].map((c) => Number(c.textContent))));
  expect(table.flat().reduce((a, b) => a + b, 0)).toBe(360);
  expect(table.reduce((n, row, i) => n + row[i]!, 0) / 360).toBeCloseTo((await accuracy(page)) / 100, 2);
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step 450");
  await page.reload();
  await settle(page, { Epochs: "1" });
  await page.getByRole("button", { name: "Continue saved" }).click();
  await until(page, "Done: 45 steps");
  expect(await accuracy(page)).toBeGreaterThan(90);
  await page.getByText("Here is the code that did this").click();
  const [file] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download model.onnx" }).click()]);
  const path = join(site.folder, "model.onnx");
  await file.saveAs(path);
  const shown = await page.locator("#grid figcaption").allInnerTexts();
  const guesses = runPython(
    `
import json, sys, zlib, numpy as np, onnxruntime
digits = np.frombuffer(zlib.decompress(open(sys.argv[2], "rb").read(), -15), np.uint8).reshape(-1, 64)[-360:][:30].astype(np.float32) / 16
print(json.dumps(onnxruntime.InferenceSession(sys.argv[1]).run(None, {"x": digits})[0].argmax(1).tolist()))
`,
    path, `${SITE}/public/data/digits.packed`,
  );
  expect(shown.map((t) => parseInt(t))).toEqual(JSON.parse(guesses));
  expect(readFileSync(path).length).toBeGreaterThan(1000);
  expect(complaints).toEqual([]);
  await close();
});

test("it learns a sign of one's own from one drawing, and still reads digits", async () => {
  const { page, complaints, close } = await site.page("draw/", DESK);
  await settle(page, { Epochs: "6" });
  const teach = page.getByRole("button", { name: "Learn it" });
  await teach.click();
  await until(page, "Failed: draw something first");
  await train(page);
  await until(page, "Done: 270 steps");
  await draw(page, [[0.1, 0.1], [0.9, 0.9]], [[0.9, 0.1], [0.1, 0.9]]);
  await page.getByLabel("My drawing is").fill("cross");
  await page.keyboard.press("Enter");
  await until(page, 'It has learned "cross"');
  expect(await page.locator("#verdict").innerText()).toBe("This is cross");
  expect(await page.locator("#bars li").count()).toBe(11);
  expect(await page.locator("#examples li").count()).toBe(1);
  expect(await accuracy(page)).toBeGreaterThan(85);
  // Another cross, slanted and smaller; then a one.
  await page.getByRole("button", { name: "Clear" }).click();
  await draw(page, [[0.3, 0.25], [0.7, 0.8]], [[0.75, 0.3], [0.25, 0.7]]);
  await page.waitForFunction(() => document.querySelector("#verdict")!.textContent!.endsWith("cross"));
  await page.getByRole("button", { name: "Clear" }).click();
  await draw(page, [[0.5, 0.1], [0.5, 0.9]]);
  await page.waitForFunction(() => /a \d$/.test(document.querySelector("#verdict")!.textContent!));
  // Saved and opened again, it has eleven classes.
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step");
  await page.reload();
  await settle(page, { Epochs: "1" });
  await page.getByRole("button", { name: "Continue saved" }).click();
  await until(page, "Done: 4");
  expect(await page.locator("#bars li").count()).toBe(11);
  await page.getByRole("button", { name: "Forget my drawings" }).click();
  await until(page, "Done: 45 steps");
  expect(await page.locator("#bars li").count()).toBe(10);
  expect(complaints).toEqual([]);
  await close();
});

test("the page works on a phone and by keyboard", async () => {
  const { page, close } = await site.page("draw/", PHONE);
  await settle(page, { Epochs: "20000" });
  await page.getByLabel("Model").selectOption("cnn");
  await page.locator("#start").focus();
  await page.keyboard.press("Enter");
  // The tiles of the net before, which stay until this one has its own, are 64.
  await expect.poll(() => page.locator("#tiles canvas").count()).toBe(8);
  await page.locator("#stop").focus();
  await page.keyboard.press("Space");
  await until(page, "Stopped.");
  expect(await page.locator("#start").isEnabled()).toBe(true);
  // A stroke by keys: the model answers.
  await page.locator("#pad").focus();
  for (let i = 0; i < 12; i++) await page.keyboard.press("ArrowDown");
  await drawn(page);
  await page.keyboard.press("Escape");
  await expect.poll(() => shares(page)).toEqual(Array(10).fill(""));
  await close();
});

test("settings that cannot be are named, and the status tells what happens", async () => {
  const { page, close } = await site.page("draw/", DESK);
  await settle(page, {});
  for (const [name, value, words] of [
    ["Learning rate", "-1", "Failed: Learning rate is -1, expected a number above 0"],
    ["Learning rate", "", "Failed: Learning rate is empty, expected a number above 0"],
    ["Learning rate", "0", "Failed: Learning rate is 0, expected a number above 0"],
    ["Epochs", "0", "Failed: Epochs is 0, expected a whole number above 0"],
    ["Epochs", "1.5", "Failed: Epochs is 1.5, expected a whole number above 0"],
    ["Batch size", "-4", "Failed: Batch size is -4, expected a whole number above 0"],
    ["Training digits", "", "Failed: Training digits is empty, expected a whole number above 0"],
  ] as const) {
    const field = page.getByLabel(name);
    const before = await field.inputValue();
    await field.fill(value);
    await train(page);
    await until(page, words);
    await field.fill(before);
  }
  // What is clicked while the model is being loaded counts.
  await page.evaluate(() => ["start", "pause"].forEach((id) => document.getElementById(id)!.click()));
  await until(page, "Paused.");
  await page.getByRole("button", { name: "Resume" }).click();
  await until(page, "Done: 450 steps");
  await page.evaluate(() => {
    const said: string[] = ((globalThis as { said?: string[] }).said = []);
    new MutationObserver(() => said.push(document.querySelector("#status")!.textContent!)).observe(document.querySelector("#status")!, { childList: true });
  });
  await page.getByLabel("Epochs").fill("2");
  await train(page);
  await until(page, "Done: 90 steps");
  const said = await page.evaluate(() => (globalThis as unknown as { said: string[] }).said);
  expect(said.map((words) => words.replace(/in [\d.]+ s/, "in S"))).toEqual([
    "Loading ONNX Runtime and the model ...", "Epoch 1 of 2 on wasm.", "Epoch 2 of 2 on wasm.", "Done: 90 steps in S on wasm.",
  ]);
  // Without a GPU the page says so and trains on wasm.
  await page.getByLabel("Device").selectOption("webgpu");
  await page.getByLabel("Epochs").fill("1");
  await train(page);
  await until(page, "Done: 45 steps");
  const messages = await page.evaluate(() => (globalThis as unknown as { said: string[] }).said.slice(4).join(" "));
  expect(messages).toContain("WebGPU is not used, training runs on wasm");
  await close();
});

test.each([["digits", "cnn", 10, 94], ["digits", "attention", 10, 88], ["mnist", "mlp", 5, 91]] as const)("%s with the %s", async (data, model, epochs, wanted) => {
  const { page, close } = await site.page("draw/", DESK);
  await settle(page, {});
  if (data === "mnist") {
    await page.locator("#data").selectOption(data);
    await until(page, "Press");
  }
  await page.getByLabel("Model").selectOption(model);
  await page.getByLabel("Epochs").fill(String(epochs));
  await train(page);
  await until(page, "Done");
  console.log(`${data}, ${model}: ${await accuracy(page)} %; ${await page.locator("#status").innerText()}`);
  expect(await accuracy(page)).toBeGreaterThan(wanted);
  await close();
});
