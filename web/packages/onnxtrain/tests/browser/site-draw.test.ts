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

/** Draws strokes on the pad; coordinates are relative to its size. */
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

/** Stops the run that starts automatically and opens the settings. */
async function settle(page: Page, settings: Record<string, string>): Promise<void> {
  await interrupt(page, "stop");
  await until(page, "Stopped");
  if (!(await page.getByLabel("Speed").isVisible())) await page.locator(".training summary").click();
  await page.getByLabel("Speed").selectOption("0");
  for (const [name, value] of Object.entries(settings)) await page.getByLabel(name).fill(value);
}
/** A zero has a hole: pixels in the middle speak against it, in blue. */
async function learnedShapes(page: Page): Promise<void> {
  const pixels = await page.locator("#tiles canvas").first().evaluate((c) => [...(c as HTMLCanvasElement).getContext("2d")!.getImageData(3, 3, 2, 2).data]);
  const mean = (channel: number) => pixels.filter((_, i) => i % 4 === channel).reduce((a, b) => a + b) / 4;
  expect(mean(2)).toBeGreaterThan(mean(0) + 20);
}

const train = (page: Page) => page.getByRole("button", { name: "Train from scratch" }).click();

test("trains automatically; pause, draw, save, resume after a reload and download the model", async () => {
  const { page, pageErrors, close } = await site.page("draw/", { ...DESK, acceptDownloads: true });
  await interrupt(page, "pause");
  await until(page, "Paused");
  // Below 3 s on an idle machine; not asserted, because this one may be busy.
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
  expect(await page.locator("#tiles canvas").count()).toBe(10);
  await learnedShapes(page);
  // The confusion matrix contains all test digits, most of them on the diagonal.
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
  await page.getByText("Show the code").click();
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
  expect(pageErrors).toEqual([]);
  await close();
});

test("learns a new symbol from one drawing and still recognizes digits", async () => {
  const { page, pageErrors, close } = await site.page("draw/", DESK);
  await settle(page, { Epochs: "6" });
  const teach = page.getByRole("button", { name: "Learn it" });
  await teach.click();
  await until(page, "Failed: draw something first");
  await train(page);
  await until(page, "Done: 270 steps");
  const before = await accuracy(page);
  await draw(page, [[0.1, 0.1], [0.9, 0.9]], [[0.9, 0.1], [0.1, 0.9]]);
  await page.getByLabel("My drawing is").fill("cross");
  await page.keyboard.press("Enter");
  await until(page, 'Learned "cross"');
  expect(await page.locator("#verdict").innerText()).toBe("This is cross");
  expect(await page.locator("#bars li").count()).toBe(11);
  expect(await page.locator("#examples li").count()).toBe(1);
  // Replay: the digits cost less than half a point (one of 360 test digits is 0.28).
  expect(await accuracy(page)).toBeGreaterThan(before - 0.5);
  // A smaller, slanted cross; then a one.
  await page.getByRole("button", { name: "Clear" }).click();
  await draw(page, [[0.3, 0.25], [0.7, 0.8]], [[0.75, 0.3], [0.25, 0.7]]);
  await page.waitForFunction(() => document.querySelector("#verdict")!.textContent!.endsWith("cross"));
  await page.getByRole("button", { name: "Clear" }).click();
  await draw(page, [[0.5, 0.1], [0.5, 0.9]]);
  await page.waitForFunction(() => /a \d$/.test(document.querySelector("#verdict")!.textContent!));
  // After saving and reloading there are eleven classes.
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step");
  await page.reload();
  await settle(page, { Epochs: "1" });
  await page.getByRole("button", { name: "Continue saved" }).click();
  await until(page, "Done: 4");
  expect(await page.locator("#bars li").count()).toBe(11);
  await page.getByRole("button", { name: "Delete my drawings" }).click();
  await until(page, "Done: 45 steps");
  expect(await page.locator("#bars li").count()).toBe(10);
  expect(pageErrors).toEqual([]);
  await close();
});

test("the page works on a phone and by keyboard", async () => {
  const { page, close } = await site.page("draw/", PHONE);
  await settle(page, { Epochs: "20000" });
  await page.getByLabel("Model").selectOption("cnn");
  await page.locator("#start").focus();
  await page.keyboard.press("Enter");
  // The previous net had 10 tiles, which stay until the new net has drawn its own.
  await expect.poll(() => page.locator("#tiles canvas").count()).toBe(8);
  await page.locator("#stop").focus();
  await page.keyboard.press("Space");
  await until(page, "Stopped.");
  expect(await page.locator("#start").isEnabled()).toBe(true);
  // A stroke with the arrow keys: the model responds.
  await page.locator("#pad").focus();
  for (let i = 0; i < 12; i++) await page.keyboard.press("ArrowDown");
  await drawn(page);
  await page.keyboard.press("Escape");
  await expect.poll(() => shares(page)).toEqual(Array(10).fill(""));
  await close();
});

test("errors name invalid settings, and the status reports the progress", async () => {
  const { page, close } = await site.page("draw/", DESK);
  await settle(page, {});
  for (const [name, value, message] of [
    ["Learning rate", "-1", "Failed: Learning rate must be a positive number, got -1"],
    ["Learning rate", "", "Failed: Learning rate must be a positive number, got an empty value"],
    ["Learning rate", "0", "Failed: Learning rate must be a positive number, got 0"],
    ["Epochs", "0", "Failed: Epochs must be a positive integer, got 0"],
    ["Epochs", "1.5", "Failed: Epochs must be a positive integer, got 1.5"],
    ["Batch size", "-4", "Failed: Batch size must be a positive integer, got -4"],
    ["Training digits", "", "Failed: Training digits must be a positive integer, got an empty value"],
  ] as const) {
    const field = page.getByLabel(name);
    const before = await field.inputValue();
    await field.fill(value);
    await train(page);
    await until(page, message);
    await field.fill(before);
  }
  // Pause also works while the model is loading.
  await page.evaluate(() => ["start", "pause"].forEach((id) => document.getElementById(id)!.click()));
  await until(page, "Paused.");
  await page.getByRole("button", { name: "Resume" }).click();
  await until(page, "Done: 450 steps");
  await page.evaluate(() => {
    const statuses: string[] = ((globalThis as { statuses?: string[] }).statuses = []);
    new MutationObserver(() => statuses.push(document.querySelector("#status")!.textContent!)).observe(document.querySelector("#status")!, { childList: true });
  });
  await page.getByLabel("Epochs").fill("2");
  await train(page);
  await until(page, "Done: 90 steps");
  const statuses = await page.evaluate(() => (globalThis as unknown as { statuses: string[] }).statuses);
  expect(statuses.map((text) => text.replace(/in [\d.]+ s/, "in S"))).toEqual([
    "Loading ONNX Runtime and the model ...", "Epoch 1 of 2 on wasm.", "Epoch 2 of 2 on wasm.", "Done: 90 steps in S on wasm.",
  ]);
  // Without a GPU the page reports the fallback and trains on wasm.
  await page.getByLabel("Device").selectOption("webgpu");
  await page.getByLabel("Epochs").fill("1");
  await train(page);
  await until(page, "Done: 45 steps");
  const messages = await page.evaluate(() => (globalThis as unknown as { statuses: string[] }).statuses.slice(4).join(" "));
  expect(messages).toContain("falling back from WebGPU to wasm");
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
