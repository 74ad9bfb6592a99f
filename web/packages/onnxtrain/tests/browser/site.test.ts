import { execFileSync } from "node:child_process";
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Browser, Page } from "playwright-core";
import { build, preview, type PreviewServer } from "vite";
import { afterAll, beforeAll, expect, test } from "vitest";
import { FIXTURES, python, ROOT, runPython } from "../support.js";
import { openPage, start } from "./page.js";
import { serveFolder } from "./project.js";

const root = `${ROOT}/web/site`;
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
});
afterAll(async () => {
  await browser?.close();
  await server?.close();
  rmSync(folder, { recursive: true });
});

const status = (page: Page) => page.locator("#status").innerText();
/** Waits for words that stay on the screen: what is there for an instant may be missed. */
const until = (page: Page, words: string) =>
  page.waitForFunction((w) => document.querySelector("#status")!.textContent!.includes(w), words);

/** Waits for the end of the first epoch. */
const learned = (page: Page) => page.waitForFunction(() => document.querySelector("#accuracy")!.textContent !== "-");
const drawn = (page: Page) => page.waitForFunction(() => [...document.querySelectorAll("meter")].some((m) => m.value > 0.2));

test("a person trains, pauses, draws, saves, comes back and takes the model along", async () => {
  const context = await browser.newContext({ acceptDownloads: true });
  const page = await context.newPage();
  const errors: string[] = [];
  page.on("pageerror", (error) => errors.push(error.message));
  await page.goto(address);
  await page.getByText("Settings").click();
  await page.getByLabel("Epochs").fill("1000");
  await page.getByRole("button", { name: "Train", exact: true }).click();
  await until(page, "Epoch ");
  await learned(page);
  // Below 3 s on a machine that does nothing else; this one may be busy.
  console.log(`from the click to the first step: ${await page.locator("#first").innerText()}`);
  await page.getByRole("button", { name: "Pause" }).click();
  await until(page, "Paused");
  const loss = await page.locator("#loss").innerText();
  const box = (await page.locator("#pad").boundingBox())!;
  await page.mouse.move(box.x + box.width / 2, box.y + 30);
  await page.mouse.down();
  await page.mouse.move(box.x + box.width / 2, box.y + box.height - 30, { steps: 12 });
  await page.mouse.up();
  await drawn(page);
  expect(await page.locator("#loss").innerText()).toBe(loss);
  await page.getByRole("button", { name: "Clear" }).click();
  expect(await page.evaluate(() => [...document.querySelectorAll("meter")].map((m) => m.value))).toEqual(Array(10).fill(0));
  await page.getByRole("button", { name: "Resume" }).click();
  await until(page, "Epoch ");
  await page.getByRole("button", { name: "Stop" }).click();
  await until(page, "Stopped");
  await page.getByLabel("Epochs").fill("10");
  await page.getByRole("button", { name: "Train", exact: true }).click();
  await until(page, "Done");
  expect(parseFloat(await page.locator("#accuracy").innerText())).toBeGreaterThan(90);
  expect(await page.locator("#grid .right").count()).toBeGreaterThan(24);
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step 450");
  await page.reload();
  await page.getByText("Settings").click();
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
});

test("the page fits a phone, works by keyboard, and stops", async () => {
  const page = await browser.newPage({ viewport: { width: 360, height: 740 }, colorScheme: "dark" });
  await page.goto(address);
  expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(360);
  await page.locator("summary").first().focus();
  await page.keyboard.press("Enter");
  await page.getByLabel("Model").selectOption("cnn");
  await page.getByLabel("Epochs").fill("200");
  await page.locator("#start").focus();
  await page.keyboard.press("Enter");
  await until(page, "Epoch ");
  await learned(page);
  await page.locator("#stop").click();
  await until(page, "Stopped");
  expect(await status(page)).toBe("Stopped.");
  expect(await page.locator("#start").isEnabled()).toBe(true);
  // A stroke by keys: the model answers.
  await page.locator("#pad").focus();
  for (let i = 0; i < 12; i++) await page.keyboard.press("ArrowDown");
  await drawn(page);
  await page.keyboard.press("Escape");
  await page.waitForFunction(() => [...document.querySelectorAll("meter")].every((m) => m.value === 0));
  await page.close();
});

test("settings that cannot be are named, and the status tells what happens", async () => {
  const page = await browser.newPage();
  await page.goto(address);
  await page.getByText("Settings").click();
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
    await page.getByRole("button", { name: "Train", exact: true }).click();
    await until(page, words);
    expect(await page.locator("#loss").innerText()).toBe("-");
    await field.fill(before);
  }
  // What is clicked while the model is being loaded counts.
  await page.evaluate(() => ["start", "pause"].forEach((id) => document.getElementById(id)!.click()));
  await until(page, "Paused.");
  expect(await page.locator("#first").innerText()).not.toBe("-");
  await page.getByRole("button", { name: "Resume" }).click();
  await until(page, "Done: 450 steps");
  await page.evaluate(() => {
    const said: string[] = ((globalThis as { said?: string[] }).said = []);
    new MutationObserver(() => said.push(document.querySelector("#status")!.textContent!)).observe(document.querySelector("#status")!, { childList: true });
  });
  await page.getByLabel("Epochs").fill("2");
  await page.getByRole("button", { name: "Train", exact: true }).click();
  await until(page, "Done: 90 steps");
  const said = await page.evaluate(() => (globalThis as unknown as { said: string[] }).said);
  expect(said.map((words) => words.replace(/in [\d.]+ s/, "in S"))).toEqual([
    "Loading ONNX Runtime and the model ...", "Epoch 1 of 2 on wasm.", "Epoch 2 of 2 on wasm.", "Done: 90 steps in S on wasm.",
  ]);
  await page.close();
});

test("without a GPU the page says so and trains on wasm", async () => {
  const page = await browser.newPage();
  await page.goto(address);
  await page.getByText("Settings").click();
  await page.getByLabel("Device").selectOption("webgpu");
  await until(page, "WebGPU is not used, training runs on wasm");
  await page.getByLabel("Epochs").fill("1");
  await page.getByRole("button", { name: "Train", exact: true }).click();
  await until(page, "Done: 45 steps");
  expect(await status(page)).toMatch(/on wasm\.$/);
  await page.close();
});

test("the built page works below a path, without headers, and may do nothing else", async () => {
  symlinkSync(`${root}/dist`, join(folder, "below"));
  const site = await serveFolder(folder);
  const { page, complaints } = await openPage(browser, `${site.address}below/`);
  await page.getByText("Settings").click();
  await page.getByLabel("Epochs").fill("1");
  await page.getByRole("button", { name: "Train", exact: true }).click();
  await until(page, "Done: 45 steps");
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step 45");
  expect(complaints).toEqual([]);
  await page.evaluate(() => {
    document.addEventListener("securitypolicyviolation", (event) => (document.title += ` ${event.effectiveDirective}`));
    document.body.insertAdjacentHTML("beforeend", "<img src=x onerror=\"document.title = 'ran'\">");
    document.head.append(Object.assign(document.createElement("script"), { textContent: "document.title = 'ran'" }));
    void fetch("https://example.org/").catch(() => undefined);
  });
  await page.waitForFunction(() => ["connect-src", "script-src-elem", "script-src-attr"].every((d) => document.title.includes(d)));
  expect(await page.title()).not.toContain("ran");
  await page.close();
  site.server.close();
});

/** Gives the processor's time of all tabs so far, which does not depend on what else the machine does. */
async function processorTime(): Promise<number> {
  const devtools = await browser.newBrowserCDPSession();
  const { processInfo } = await devtools.send("SystemInfo.getProcessInfo");
  await devtools.detach();
  return processInfo.filter((p) => p.type === "renderer").reduce((sum, p) => sum + p.cpuTime, 0);
}

test.each([["mlp", 91], ["cnn", 96], ["attention", 90]] as const)("MNIST with the %s", async (model, wanted) => {
  const page = await browser.newPage();
  await page.goto(address);
  await page.getByText("Settings").click();
  await page.locator("#data").selectOption("mnist");
  await page.getByLabel("Model").selectOption(model);
  await page.waitForFunction(() => document.querySelector<HTMLInputElement>("#rows")!.value === "10000");
  if (model !== "mlp") await page.getByLabel("Epochs").fill("3");
  const before = await processorTime();
  await page.getByRole("button", { name: "Train", exact: true }).click();
  await until(page, "Done");
  const used = (await processorTime()) - before;
  const seconds = parseFloat(/in ([\d.]+) s/.exec(await status(page))![1]!);
  const accuracy = parseFloat(await page.locator("#accuracy").innerText());
  console.log(`MNIST, ${model}: ${accuracy} % after ${seconds} s, ${used.toFixed(1)} s of a processor`);
  expect(accuracy).toBeGreaterThan(wanted);
  await page.close();
});

test("a person trains a model of their own with numbers from a CSV and an NPZ", async () => {
  const own = `${FIXTURES}/mlp-wasm`;
  const names = ["manifest.json", "checkpoint", "step_model.onnx", "eval_model.onnx", "inference_model.onnx"];
  const manifest = JSON.parse(readFileSync(`${own}/manifest.json`, "utf8")) as { models: { file: string }[] };
  const files = [...new Set([...names, ...manifest.models.map((m) => m.file)])];
  mkdirSync(join(folder, "art"));
  for (const name of files) cpSync(`${own}/${name}`, join(folder, "art", name));
  // The class is the largest of the first four numbers.
  runPython(
    `
import sys, numpy as np
x = np.random.default_rng(0).standard_normal((400, 10)).astype(np.float32); labels = x[:, :4].argmax(1)
folder = sys.argv[1]
np.savez_compressed(folder + "/good.npz", x=x, labels=labels)
np.savez(folder + "/short.npz", x=x[:, :9], labels=labels)
np.savez(folder + "/unnamed.npz", rows=x, labels=labels)
head = ",".join([f"x.{i}" for i in range(10)] + ["labels"])
rows = [",".join([*(f"{v:.5f}" for v in row), str(l)]) for row, l in zip(x, labels)]
open(folder + "/good.csv", "w").write("\\n".join([head, *rows]))
open(folder + "/ones.csv", "w").write("\\n".join([head, *(",".join([*(f"{v:.5f}" for v in row), str(l + 1)]) for row, l in zip(x, labels))]))
open(folder + "/first.txt", "w").write(str(labels.tolist().index(3)))
open(folder + "/word.csv", "w").write("\\n".join([head, *rows[:2], rows[2].replace(rows[2].split(",")[3], "much")]))
open(folder + "/few.csv", "w").write("\\n".join([head.replace("x.9,", "")] + [",".join(r.split(",")[1:]) for r in rows]))
open(folder + "/half.csv", "w").write("\\n".join([head, *rows[:5], rows[5].rsplit(",", 1)[0] + ",0.5"]))
`,
    folder,
  );
  const page = await browser.newPage();
  await page.goto(address);
  await page.getByText("Settings").click();
  await page.getByLabel("Epochs").fill("1");
  await page.getByRole("button", { name: "Train", exact: true }).click();
  await until(page, "Done: 45 steps");
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step 45");
  await page.getByLabel("Epochs").fill("10");
  await page.getByText("Train your own model").click();
  await page.setInputFiles("#own-data", join(folder, "good.csv"));
  await page.getByText("Failed: give the folder of artifacts first").waitFor();
  await page.setInputFiles("#own-model", join(folder, "art"));
  const state = page.locator("#own-state");
  await expect.poll(() => state.innerText()).toMatch(/It takes x \(float32\[batch, 10\]\) and labels \(int64\[batch\]\)/);
  for (const [file, words] of [
    ["word.csv", /word.csv: column 'x.3', line 4: 'much' is not a number/],
    ["few.csv", /few.csv: the model takes 'x' \(float32\[batch, 10\]\), which is 10 columns; there are 9: x.0, x.1/],
    ["half.csv", /half.csv: column 'labels', line 7: 0.5 is no whole number, 'labels' \(int64\[batch\]\) takes those/],
    ["short.npz", /short.npz: the model takes 'x' \(float32\[batch, 10\]\), the array has shape \[400, 9\]/],
    ["unnamed.npz", /unnamed.npz: the model takes 'x' .*the archive has rows, labels/],
  ] as const) {
    await page.setInputFiles("#own-data", join(folder, file));
    await expect.poll(() => state.innerText()).toMatch(words);
  }
  await page.getByLabel("Learning rate").fill("0.02");
  for (const file of ["good.npz", "good.csv"]) {
    await page.setInputFiles("#own-data", join(folder, file));
    await expect.poll(() => state.innerText()).toContain(`400 rows from ${file}`);
    await page.getByRole("button", { name: "Train my model" }).click();
    await until(page, "Done: 100 steps");
    expect(parseFloat(await page.locator("#accuracy").innerText())).toBeGreaterThan(75);
    await page.evaluate(() => (document.querySelector("#status")!.textContent = ""));
  }
  await page.setInputFiles("#own-data", join(folder, "ones.csv"));
  await expect.poll(() => state.innerText()).toContain("400 rows from ones.csv");
  await page.getByRole("button", { name: "Train my model" }).click();
  await until(page, `Failed: ones.csv: 'labels' has 4 in row ${readFileSync(join(folder, "first.txt"), "utf8")}; the model has 4 classes: 0 to 3`);
  await page.setInputFiles("#own-data", join(folder, "good.csv"));
  await expect.poll(() => state.innerText()).toContain("400 rows from good.csv");
  await page.getByRole("button", { name: "Train my model" }).click();
  await until(page, "Done: 100 steps");
  // Its save is beside that of the digits, not over it.
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step 100");
  await page.getByRole("button", { name: "Continue saved" }).click();
  await until(page, "Done: 100 steps");
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step 200");
  await page.reload();
  await page.getByText("Settings").click();
  await page.getByLabel("Epochs").fill("1");
  await page.getByRole("button", { name: "Continue saved" }).click();
  await until(page, "Done: 45 steps");
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await until(page, "Saved at step 90");
  await page.close();
});

test.runIf(process.env["SCREENSHOTS"])("pictures for the docs", async () => {
  for (const [name, scheme, width, height] of [["light", "light", 1100, 900], ["dark", "dark", 1100, 900], ["phone", "light", 390, 844]] as const) {
    const page = await browser.newPage({ viewport: { width, height }, colorScheme: scheme });
    await page.goto(address);
    await page.getByRole("button", { name: "Train", exact: true }).click();
    await until(page, "Epoch ");
    const box = (await page.locator("#pad").boundingBox())!;
    const at = (x: number, y: number) => [box.x + x * box.width, box.y + y * box.height] as const;
    await page.mouse.move(...at(0.3, 0.25));
    await page.mouse.down();
    for (const [x, y] of [[0.7, 0.25], [0.45, 0.8]] as const) await page.mouse.move(...at(x, y), { steps: 8 });
    await page.mouse.up();
    await until(page, "Done");
    await page.evaluate(() => scrollTo(0, 0));
    await page.screenshot({ path: `${ROOT}/docs/images/demo-${name}.png` });
    await page.close();
  }
});
