import { existsSync } from "node:fs";
import type { Page } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { distance } from "../support.js";
import { openPage, serve } from "./page.js";
import { DESK, interrupt, Site, SITE, until } from "./site.js";

// The pages with a device setting, on a software GPU; the others train on wasm only.
let site: Site;
beforeAll(async () => {
  site = await Site.open({ webgpu: true });
});
afterAll(() => site?.close());

const number = async (page: Page, id: string) => parseFloat(await page.locator(`#${id}`).innerText());

test("the model of Write trains on WebGPU as on wasm, and no file is downloaded twice", async () => {
  const { server, address } = await serve(true);
  const { page } = await openPage(site.browser, address);
  const fetched: string[] = [];
  await page.route("**/writer/*", (route) => {
    const name = new URL(route.request().url()).pathname.split("/").pop()!;
    fetched.push(name);
    const path = `${SITE}/public/art/writer/${name}`;
    return existsSync(path) ? route.fulfill({ path }) : route.fulfill({ status: 404 });
  });
  const learn = (device: "wasm" | "webgpu") => page.evaluate(async (device) => {
    const messages: string[] = [];
    const trainer = await onnxtrain.Trainer.create({ artifacts: "/writer/", device, onMessage: (m) => messages.push(m) });
    const ids = BigInt64Array.from({ length: 128 }, (_, i) => BigInt((i * i + 3) % 40));
    const losses: number[] = [];
    for (let i = 0; i < 3; i++) losses.push((await trainer.step({ ids, labels: ids })).loss);
    const { logits } = await trainer.predict({ ids: ids.slice(0, 64) });
    const result = { device: trainer.device, losses, logits: [...(logits!.data as Float32Array)] };
    await trainer.dispose();
    return { ...result, messages };
  }, device);
  const gpu = await learn("webgpu");
  expect(gpu.messages).toEqual([]);
  expect(gpu.device).toBe("webgpu");
  // Prediction uses a second session with the current weights: each file is downloaded once, including the inference model.
  expect(new Set(fetched).size).toBe(fetched.length);
  expect(fetched).toContain("inference_model.onnx");
  const cpu = await learn("wasm");
  expect(distance(gpu.losses, cpu.losses)).toBeLessThan(1e-3);
  expect(gpu.losses[2]).toBeLessThan(gpu.losses[0]!);
  expect(distance(gpu.logits, cpu.logits)).toBeLessThan(1e-2);
  await page.close();
  server.close();
});

test("Write trains on WebGPU, set by a link; changing the device restarts training", async () => {
  const { page, close } = await site.page("write/#device=webgpu", DESK);
  await until(page, "Training on webgpu.");
  await page.getByLabel("Device").selectOption("wasm");
  await until(page, "Training on wasm.");
  await page.waitForFunction(() => Number(document.querySelector("#steps")!.textContent) >= 1);
  expect(await number(page, "loss")).toBeLessThan(Math.log(128) + 0.5); // at first all characters are equally likely
  await close();
});

test("Draw reaches the same accuracy on WebGPU and wasm", async () => {
  const { page, close } = await site.page("draw/", DESK);
  await interrupt(page, "stop");
  await until(page, "Stopped");
  if (!(await page.getByLabel("Speed").isVisible())) await page.locator(".training summary").click();
  await page.getByLabel("Speed").selectOption("0");
  await page.getByLabel("Epochs").fill("3");
  const right: number[] = [];
  for (const device of ["wasm", "webgpu"]) {
    await page.getByLabel("Device").selectOption(device);
    await page.getByRole("button", { name: "Train from scratch" }).click();
    await page.waitForFunction((name) => new RegExp(`^Done: 135 steps in .* on ${name}\\.$`).test(document.querySelector("#status")!.textContent!), device);
    right.push(await number(page, "accuracy"));
  }
  expect(right[0]).toBeGreaterThan(75);
  expect(Math.abs(right[1]! - right[0]!)).toBeLessThan(2);
  await close();
});
