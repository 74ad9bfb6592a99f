import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Browser, Page } from "playwright-core";
import { build, preview, type PreviewServer } from "vite";
import { afterAll, beforeAll, expect, test } from "vitest";
import { python, ROOT, runPython } from "../support.js";
import { start } from "./page.js";

const root = `${ROOT}/web/demo`;
const folder = mkdtempSync(join(tmpdir(), "onnxtrain-"));
let server: PreviewServer;
let browser: Browser;
let address: string;

beforeAll(async () => {
  execFileSync(python(), [`${root}/make_artifacts.py`, `${root}/public`], { stdio: "inherit" });
  await build({ root, logLevel: "error" });
  server = await preview({ root, logLevel: "error", preview: { port: 0 } });
  address = server.resolvedUrls!.local[0]!;
  browser = await start();
}, 300_000);
afterAll(async () => {
  await browser?.close();
  await server?.close();
  rmSync(folder, { recursive: true });
});

const status = (page: Page) => page.locator("#status").innerText();
const until = (page: Page, words: string) =>
  page.waitForFunction((w) => document.querySelector("#status")!.textContent!.includes(w), words, { timeout: 240_000 });

test("a person trains, pauses, draws, saves, comes back and takes the model along", async () => {
  const context = await browser.newContext({ acceptDownloads: true });
  const page = await context.newPage();
  const errors: string[] = [];
  page.on("pageerror", (error) => errors.push(error.message));
  await page.goto(address);
  await page.getByRole("button", { name: "Train" }).click();
  await until(page, "Epoch 2");
  await page.getByRole("button", { name: "Pause" }).click();
  await until(page, "Paused");
  const loss = await page.locator("#loss").innerText();
  const box = (await page.locator("#pad").boundingBox())!;
  await page.mouse.move(box.x + box.width / 2, box.y + 30);
  await page.mouse.down();
  await page.mouse.move(box.x + box.width / 2, box.y + box.height - 30, { steps: 12 });
  await page.mouse.up();
  await page.waitForFunction(() => [...document.querySelectorAll("meter")].some((m) => m.value > 0.2));
  expect(await page.locator("#loss").innerText()).toBe(loss);
  await page.getByRole("button", { name: "Resume" }).click();
  await until(page, "Done");
  expect(parseFloat(await page.locator("#accuracy").innerText())).toBeGreaterThan(90);
  expect(await page.locator("#grid .right").count()).toBeGreaterThan(24);
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step 450");
  await page.reload();
  await page.locator("summary").click();
  await page.getByLabel("Epochs").fill("1");
  await page.getByRole("button", { name: "Continue saved" }).click();
  await until(page, "Done: 45 steps");
  expect(parseFloat(await page.locator("#accuracy").innerText())).toBeGreaterThan(90);
  const [file] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download model.onnx" }).click()]);
  const path = join(folder, "model.onnx");
  await file.saveAs(path);
  const shown = await page.locator("#grid figcaption").allInnerTexts();
  const guesses = runPython(
    `
import json, sys, numpy as np, onnxruntime
digits = np.fromfile(sys.argv[2], np.uint8).reshape(-1, 1, 8, 8)[-360:][:30].astype(np.float32) / 16
print(json.dumps(onnxruntime.InferenceSession(sys.argv[1]).run(None, {"image": digits})[0].argmax(1).tolist()))
`,
    path, `${root}/public/data/digits.bin`,
  );
  expect(shown.map((t) => parseInt(t))).toEqual(JSON.parse(guesses));
  expect(readFileSync(path).length).toBeGreaterThan(1000);
  expect(errors).toEqual([]);
  await context.close();
}, 180_000);

test("the page fits a phone, works by keyboard, and stops", async () => {
  const page = await browser.newPage({ viewport: { width: 360, height: 740 }, colorScheme: "dark" });
  await page.goto(address);
  expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(360);
  await page.locator("summary").focus();
  await page.keyboard.press("Enter");
  await page.getByLabel("Model").selectOption("cnn");
  await page.getByLabel("Epochs").fill("200");
  await page.locator("#start").focus();
  await page.keyboard.press("Enter");
  await until(page, "Epoch 1");
  await page.locator("#stop").click();
  await until(page, "Stopped");
  expect(await status(page)).toBe("Stopped.");
  expect(await page.locator("#start").isEnabled()).toBe(true);
  await page.close();
}, 300_000);

// The time is printed, not asserted: it depends on what else the machine is doing.
test.each([["mlp", 3, 90], ["cnn", 4, 94], ["attention", 2, 85]] as const)("MNIST with the %s", async (model, epochs, wanted) => {
  const page = await browser.newPage();
  await page.goto(address);
  await page.locator("summary").click();
  await page.locator("#data").selectOption("mnist");
  await page.getByLabel("Model").selectOption(model);
  await page.getByLabel("Epochs").fill(String(epochs));
  await page.getByLabel("Batch size").fill("64");
  await page.waitForFunction(() => document.querySelector<HTMLInputElement>("#rows")!.value === "10000");
  await page.getByRole("button", { name: "Train" }).click();
  await until(page, "Done");
  const seconds = parseFloat(/in ([\d.]+) s/.exec(await status(page))![1]!);
  const accuracy = parseFloat(await page.locator("#accuracy").innerText());
  console.log(`MNIST, ${model}: ${accuracy} % after ${seconds} s`);
  expect(accuracy).toBeGreaterThan(wanted);
  await page.close();
}, 300_000);
