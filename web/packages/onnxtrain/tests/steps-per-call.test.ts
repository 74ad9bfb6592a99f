import { describe, expect, test } from "vitest";
import { cosine, readCheckpoint, Trainer, type Progress } from "../src/index.js";
import { stepsPerCall } from "../src/data.js";
import { distance, fixture } from "./support.js";

const cases = ["mlp-wasm", "cnn-web", "transformer-wasm", "gru-wasm"].flatMap((m) => ["node", "wasm"].map((d) => [m, d] as const));

describe.each(cases)("%s on %s", (name, device) => {
  test("eight steps per call match eight single steps", async () => {
    const { folder, expected, batches } = await fixture(name);
    const create = () => Trainer.create({ artifacts: folder, device: device as "node" | "wasm", seed: expected.seed, threads: 1 });
    const runs = await Promise.all([undefined, 1].map(async (stepsPerCall) => {
      const trainer = await create();
      const seen: Progress[] = [];
      const options = { schedule: cosine(0.01), ...(stepsPerCall ? { stepsPerCall } : {}) };
      for await (const m of trainer.fit(batches, options)) seen.push(m);
      const checkpoint = await trainer.exportCheckpoint();
      const { manifest, globalStep } = trainer;
      await trainer.dispose();
      return { seen, checkpoint, manifest, globalStep };
    }));
    const [several, single] = [runs[0]!, runs[1]!];
    // 20 batches are two multi-step calls and four single steps.
    expect(stepsPerCall(several.manifest, device as "node")).toBe(8);
    expect(several.globalStep).toBe(20);
    expect(several.seen.map((m) => m.step)).toEqual(single.seen.map((m) => m.step));
    expect(several.seen.map((m) => m.learningRate)).toEqual(single.seen.map((m) => m.learningRate));
    for (const key of ["loss", "accuracy"]) {
      expect(distance(several.seen.map((m) => m[key]!), single.seen.map((m) => m[key]!))).toBeLessThan(1e-6);
    }
    const logits = (m: Progress) => m.outputs["logits"]!;
    expect(several.seen.map((m) => logits(m).dims)).toEqual(single.seen.map((m) => logits(m).dims));
    expect(distance(logits(several.seen[9]!).data as Float32Array, logits(single.seen[9]!).data as Float32Array)).toBeLessThan(1e-5);
    const [a, b] = await Promise.all([several, single].map(async (r) => (await readCheckpoint(r.checkpoint)).tensors));
    expect([...a!.keys()]).toEqual([...b!.keys()]);
    for (const [key, t] of a!) expect(distance(t.data as Float32Array, b!.get(key)!.data as Float32Array)).toBeLessThan(1e-6);
  });
});

test("a constant learning rate matches Python, and batches of another size run one by one", async () => {
  const { folder, expected, batches } = await fixture("mlp-web");
  const trainer = await Trainer.create({ artifacts: folder, device: "node", seed: expected.seed });
  const losses: number[] = [];
  for await (const m of trainer.fit(batches)) losses.push(m.loss);
  expect(distance(losses, expected.losses)).toBeLessThan(1e-4);
  const columns = { x: new Float32Array(10 * 70).fill(0.1), labels: new Uint8Array(70) };
  const sizes: number[] = [];
  for await (const m of trainer.fit(columns, { batchSize: 8 })) sizes.push(m.outputs["logits"]!.dims[0]!);
  expect(sizes).toEqual([8, 8, 8, 8, 8, 8, 8, 8, 6]);
  await expect(trainer.fit(columns, { stepsPerCall: 3 }).next()).rejects.toThrow(/stepsPerCall must be 1 or 8 for these artifacts on node, got 3/);
  await trainer.dispose();
});

test("one batch per call on a GPU and with gradient accumulation", async () => {
  const manifestOf = async (name: string) => {
    const trainer = await Trainer.create({ artifacts: (await fixture(name)).folder, device: "node" });
    await trainer.dispose();
    return trainer.manifest;
  };
  expect(stepsPerCall(await manifestOf("mlp-web"), "webgpu")).toBe(1);
  expect(stepsPerCall(await manifestOf("mlp-frozen-wasm"), "wasm")).toBe(1);
  expect(stepsPerCall(await manifestOf("mlp-webgpu"), "wasm")).toBe(1);
});
