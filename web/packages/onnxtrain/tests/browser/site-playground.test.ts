import type { Page } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { DESK, PHONE, Site, until } from "./site.js";

let site: Site;

beforeAll(async () => {
  site = await Site.open();
});
afterAll(() => site?.close());

const percent = async (page: Page) => parseFloat(await page.locator("#accuracy").innerText());
const steps = async (page: Page) => Number((await page.locator("#steps").innerText()).replace(/,/g, ""));
const learned = (page: Page, share: number) =>
  page.waitForFunction((s) => parseFloat(document.querySelector("#accuracy")!.textContent!) >= s, share);

/** Returns the colors near a corner and at an edge of the plane. */
const colours = (page: Page) => page.evaluate(() => {
  const canvas = document.querySelector<HTMLCanvasElement>("#plane")!;
  const { data, width, height } = canvas.getContext("2d")!.getImageData(0, 0, canvas.width, canvas.height);
  const at = (x: number, y: number) => [0, 1, 2].map((c) => data[4 * (Math.floor(y * height) * width + Math.floor(x * width)) + c]!);
  return { corner: at(0.02, 0.02), edge: at(0.98, 0.5) };
});

test("learns a circle automatically and shows it in the plane", async () => {
  const { page, pageErrors, close } = await site.page("playground/#set=circle&hidden=6&pace=400&noise=0&seed=4", DESK);
  await learned(page, 97);
  await page.getByRole("button", { name: "Pause" }).click();
  await until(page, "Paused. Test accuracy");
  // The second class is outside: orange, with more red than blue.
  for (const [r, , b] of Object.values(await colours(page))) expect(r! - b!).toBeGreaterThan(30);
  const before = await steps(page);
  expect(await page.locator("#status").innerText()).toContain(`after ${before} steps`);
  await page.getByRole("button", { name: "One step" }).click();
  await page.waitForFunction((n) => Number(document.querySelector("#steps")!.textContent!.replace(/,/g, "")) === n + 1, before);
  await until(page, `after ${before + 1} steps`);
  // Add a point, a layer and remove a neuron.
  await page.getByLabel("orange").check();
  await page.locator("#plane").click({ position: { x: 100, y: 100 } });
  await until(page, "Added a point: 241 points.");
  await page.getByRole("button", { name: "Add a layer" }).click();
  await page.getByRole("button", { name: "Layer 2: remove a neuron" }).click();
  await page.waitForFunction(() => document.querySelectorAll(".neuron").length === 11);
  await page.waitForFunction(() => document.querySelector("#steps")!.textContent === "0");
  expect(page.url()).toContain("hidden=6-5");
  await page.getByLabel("Activation").selectOption("relu");
  await page.getByText("Show the code").click();
  expect(await page.locator(".code-panel pre").innerText()).toMatch(/hidden: \[6, 5\],\s+activation: "relu"/);
  const [file] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download model.onnx" }).click()]);
  expect(file.suggestedFilename()).toBe("model.onnx");
  expect(pageErrors).toEqual([]);
  await close();
});

test("a link restores the net and the points", async () => {
  const given = "playground/#set=arms&hidden=4-3&pace=1&rate=0.1&batch=4&seed=9&activation=gelu&decay=0.01&noise=0.2&count=100";
  const { page, close } = await site.page(given, { ...DESK, reducedMotion: "reduce" });
  await until(page, "Paused.");
  // With prefers-reduced-motion, nothing starts automatically.
  expect(await steps(page)).toBe(0);
  for (const [name, value] of [["Activation", "gelu"], ["Learning rate", "0.1"], ["Weight decay", "0.01"], ["Batch size", "4"]] as const) {
    expect(await page.getByLabel(name).inputValue()).toBe(value);
  }
  expect(await page.locator(".neuron").count()).toBe(7);
  expect(await page.locator(".output").count()).toBe(3);
  expect(await page.getByLabel("Three arms").isChecked()).toBe(true);
  await close();
});

test("works on a phone and with the keyboard only", async () => {
  const { page, pageErrors, close } = await site.page("playground/#set=clouds&hidden=2", PHONE);
  await until(page, "Training.");
  const press = async (name: string) => {
    for (let i = 0; i < 60; i++) {
      await page.keyboard.press("Tab");
      if (await page.evaluate((n) => document.activeElement!.textContent === n || document.activeElement!.getAttribute("aria-label") === n, name)) {
        return await page.keyboard.press("Enter");
      }
    }
    throw new Error(`Tab does not reach ${name}`);
  };
  await press("Pause");
  await until(page, "Paused.");
  await press("Layer 1: add a neuron");
  await page.waitForFunction(() => document.querySelectorAll(".neuron").length === 3);
  // The focus stays on the button.
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelectorAll(".neuron").length === 4);
  await page.locator("#plane").focus();
  for (const key of ["ArrowLeft", "ArrowLeft", "ArrowUp", "Enter"]) await page.keyboard.press(key);
  await until(page, "Added a point: 241 points.");
  await page.locator("#play").focus();
  await page.keyboard.press("Space");
  await learned(page, 90);
  expect(await percent(page)).toBeGreaterThanOrEqual(90);
  expect(pageErrors).toEqual([]);
  await close();
});
