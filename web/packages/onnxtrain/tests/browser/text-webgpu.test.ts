import { readFileSync } from "node:fs";
import { expect, onTestFinished, test } from "vitest";
import { distance, FIXTURES } from "../support.js";
import { openPage, serve, start } from "./page.js";

test("adapters of a 4-bit model train on WebGPU as in Python", async () => {
  const expected = JSON.parse(readFileSync(`${FIXTURES}/lm/expected.json`, "utf8")) as { losses: number[]; seed: number };
  const [browser, { server, address }] = await Promise.all([start({ webgpu: true }), serve(true)]);
  onTestFinished(async () => {
    await browser.close();
    server.close();
  });
  const { page } = await openPage(browser, address);
  const result = await page.evaluate(async (seed) => {
    const { Trainer, readCheckpoint } = onnxtrain;
    const base = new URL("/fixtures/lm/", location.href);
    const { tensors } = await readCheckpoint(new Uint8Array(await (await fetch(new URL("batches.safetensors", base))).arrayBuffer()));
    const trainer = await Trainer.create({ artifacts: base, device: "webgpu", seed });
    const losses: number[] = [];
    for (let i = 0; i < 4; i++) {
      losses.push((await trainer.step(Object.fromEntries(["input_ids", "attention_mask", "labels"].map((n) => [n, tensors.get(`${i}/${n}`)!])))).loss);
    }
    const { device } = trainer;
    await trainer.dispose();
    return { device, losses };
  }, expected.seed);
  expect(result.device).toBe("webgpu");
  expect(distance(result.losses, expected.losses.slice(0, 4))).toBeLessThan(1e-3);
});
