import type { Server } from "node:http";
import type { Browser } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import type { Trainer } from "../../src/index.js";
import { distance, fixture, MODELS } from "../support.js";
import { openPage, serve, start, train } from "./page.js";

let browser: Browser;
let site: { server: Server; address: string };
beforeAll(async () => {
  [browser, site] = await Promise.all([start({ webgpu: true }), serve(true)]);
});
afterAll(async () => {
  await browser?.close();
  site?.server.close();
});

test.each(MODELS)("%s matches Python on a software GPU", async (model) => {
  const f = await fixture(`${model}-webgpu`);
  const { page } = await openPage(browser, site.address);
  const result = await train(page, `${model}-webgpu`, { device: "webgpu", seed: f.expected.seed });
  expect(result.messages).toEqual([]);
  expect(result.device).toBe("webgpu");
  expect(distance(result.losses, f.expected.losses)).toBeLessThan(1e-4);
  expect(Math.abs(result.evaluated - f.expected.eval)).toBeLessThan(1e-4);
  expect(distance(result.logits, f.predictions.get("logits")!.data as Float32Array)).toBeLessThan(1e-3);
  await page.close();
});

test("a lost GPU throws DeviceLostError, and a new trainer resumes from the checkpoint", async () => {
  const { page } = await openPage(browser, site.address);
  const batch = "({ x: new Float32Array(20).fill(0.5), labels: [1, 2] })";
  await page.evaluate(async (batch) => {
    const { Trainer } = onnxtrain;
    const trainer = await Trainer.create({ artifacts: "/fixtures/mlp-webgpu", device: "webgpu" });
    await trainer.step(eval(batch));
    await trainer.save("gpu");
    await trainer.step(eval(batch));
    Object.assign(globalThis, { trainer });
  }, batch);
  // Destroy the device of the worker's runtime, like a driver crash.
  const [worker] = page.workers();
  await worker!.evaluate(`import("${site.address}ort/ort.webgpu.bundle.min.mjs").then(async (ort) => (await ort.env.webgpu.device).destroy())`);
  const result = await page.evaluate(async (batch) => {
    const { DeviceLostError, Trainer } = onnxtrain;
    const { trainer } = globalThis as unknown as { trainer: Trainer };
    const step = await trainer.step(eval(batch)).catch((e: Error) => e);
    const read = await trainer.exportCheckpoint().catch((e: Error) => e);
    const kinds = [step, read].map((e) => e instanceof DeviceLostError);
    await trainer.dispose();
    const again = await Trainer.create({ artifacts: "/fixtures/mlp-webgpu", device: "webgpu" });
    await again.load("gpu");
    const after = { device: again.device, step: again.globalStep, loss: (await again.step(eval(batch))).loss };
    await again.dispose();
    return { kinds, message: (step as Error).message, ...after };
  }, batch);
  expect(result.kinds).toEqual([true, true]);
  expect(result.message).toMatch(/the GPU device was lost: .*\nhint: create a new Trainer and load\(\) the last checkpoint/s);
  expect(result.device).toBe("webgpu");
  expect(result.step).toBe(1);
  expect(result.loss).toBeGreaterThan(0);
  await page.close();
});

test("without a worker, the GPU is reused after dispose and after a device loss", async () => {
  const { page } = await openPage(browser, site.address);
  await page.addScriptTag({ type: "module", content: 'import * as ort from "onnxruntime-web/webgpu"; globalThis.ort = ort;' });
  const result = await page.evaluate(async () => {
    const { DeviceLostError, Trainer } = onnxtrain;
    const messages: string[] = [];
    let lost = false;
    const run = async (lose = false) => {
      const trainer = await Trainer.create({
        artifacts: "/fixtures/mlp-webgpu", device: "webgpu", worker: false, onMessage: (m) => messages.push(m),
      });
      await trainer.step({ x: new Float32Array(20).fill(0.5), labels: [1, 2] });
      if (lose) {
        const { ort } = globalThis as unknown as { ort: { env: { webgpu: { device: Promise<{ destroy(): void }> } } } };
        (await ort.env.webgpu.device).destroy();
        lost = await trainer.predict({ x: new Float32Array(20) }).then(() => false, (e) => e instanceof DeviceLostError);
      }
      const { device } = trainer;
      await trainer.dispose();
      return device;
    };
    return { devices: [await run(), await run(true), await run()], messages, lost };
  });
  expect(result.devices).toEqual(["webgpu", "webgpu", "webgpu"]);
  expect(result.messages).toEqual([]);
  expect(result.lost).toBe(true);
  await page.close();
});
