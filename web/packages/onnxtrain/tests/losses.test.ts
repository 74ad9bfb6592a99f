import { describe, expect, test } from "vitest";
import { Trainer } from "../src/index.js";
import { distance, fixture, MODELS } from "./support.js";

// CPUs run the models for WebGPU too, which tests them without a GPU.
const cases = MODELS.flatMap((m) => ["wasm", "webgpu"].flatMap((t) => ["node", "wasm"].map((d) => [m, t, d] as const)));

describe.each(cases)("%s built for %s on %s", (model, target, device) => {
  test("matches Python for 20 steps", async () => {
    const { folder, expected, batches, predictions } = await fixture(`${model}-${target}`);
    const trainer = await Trainer.create({
      artifacts: folder, device: device as "node" | "wasm", seed: expected.seed, threads: 1,
    });
    const losses: number[] = [];
    const accuracies: number[] = [];
    for (const batch of batches) {
      const { loss, accuracy } = await trainer.step(batch);
      losses.push(loss);
      accuracies.push(accuracy!);
    }
    expect(losses.length).toBe(20);
    expect(distance(losses, expected.losses)).toBeLessThan(1e-4);
    expect(distance(accuracies, expected.accuracies)).toBeLessThan(1e-6);
    const evaluated = await trainer.evaluate([batches[0]!]);
    expect(Math.abs(evaluated.loss - expected.eval)).toBeLessThan(1e-4);
    const [input] = expected.inputs;
    const result = await trainer.predict({ [input]: batches[0]![input]! });
    const wanted = predictions.get("logits")!;
    expect(result["logits"]!.dims).toEqual(wanted.dims);
    expect(distance(result["logits"]!.data as Float32Array, wanted.data as Float32Array)).toBeLessThan(1e-3);
    await trainer.dispose();
  });
});
