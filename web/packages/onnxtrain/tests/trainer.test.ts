import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, expect, test } from "vitest";
import { cosine, DisposedError, ShapeError, Trainer, type Progress } from "../src/index.js";
import { bytes, distance, filesOf, fixture, FIXTURES, MODELS, runPython } from "./support.js";

const folder = mkdtempSync(join(tmpdir(), "onnxtrain-"));
afterAll(() => rmSync(folder, { recursive: true }));

const open = async (name: string) => {
  const f = await fixture(name);
  return { f, trainer: await Trainer.create({ artifacts: f.folder, device: "node", threads: 1 }) };
};

test.each(MODELS)("the exported %s gives the same predictions in Python", async (model) => {
  const { f, trainer } = await open(`${model}-wasm`);
  await trainer.importCheckpoint(bytes(`${f.folder}/trained.safetensors`));
  const path = join(folder, `${model}.onnx`);
  writeFileSync(path, await trainer.exportModel());
  const [input] = f.expected.inputs;
  const ours = await trainer.predict({ [input]: f.batches[0]![input]! });
  const printed = runPython(
    `
import json, sys, onnx, onnxruntime
from onnxtrain.checkpoint import from_bytes
folder, path = sys.argv[1:]
onnx.checker.check_model(path, full_check=True)
session = onnxruntime.InferenceSession(path)
batches, _ = from_bytes(open(folder + "/batches.safetensors", "rb").read())
name = session.get_inputs()[0].name
print(json.dumps(session.run(None, {name: batches["0/" + name]})[0].ravel().tolist()))
`,
    f.folder, path,
  );
  const theirs = JSON.parse(printed) as number[];
  expect(distance(ours["logits"]!.data as Float32Array, theirs)).toBeLessThan(1e-5);
  expect(distance(f.predictions.get("logits")!.data as Float32Array, theirs)).toBeLessThan(1e-5);
  await trainer.dispose();
});

test("a float16 model is trained in float32 and exported in float16", async () => {
  const trainer = await Trainer.create({ artifacts: `${FIXTURES}/float16-wasm`, device: "node", threads: 1 });
  const x = { data: Float32Array.from({ length: 80 }, (_, i) => Math.sin(i)), dims: [8, 10] };
  const labels = { data: BigInt64Array.from({ length: 8 }, (_, i) => BigInt(i % 3)), dims: [8] };
  const losses: number[] = [];
  for (let i = 0; i < 5; i++) losses.push((await trainer.step({ x, labels })).loss);
  expect(losses[4]).toBeLessThan(losses[0]!);
  const path = join(folder, "half.onnx");
  writeFileSync(path, await trainer.exportModel());
  const ours = await trainer.predict({ x });
  const [types, theirs] = JSON.parse(runPython(
    `
import json, sys, numpy as np, onnx, onnxruntime
model = onnx.load(sys.argv[1])
onnx.checker.check_model(model, full_check=True)
x = np.sin(np.arange(80)).astype(np.float32).reshape(8, 10)
logits = onnxruntime.InferenceSession(sys.argv[1]).run(["logits"], {"x": x})[0]
print(json.dumps([sorted({t.data_type for t in model.graph.initializer if "weight" in t.name}), logits.ravel().tolist()]))
`,
    path,
  )) as [number[], number[]];
  expect(types).toEqual([10]);
  expect(distance(ours["logits"]!.data as Float32Array, theirs)).toBeLessThan(1e-5);
  await trainer.dispose();
});

test("predict uses the current weights", async () => {
  const { f, trainer } = await open("mlp-wasm");
  const x = f.batches[0]!["x"]!;
  const first = (await trainer.predict({ x }))["logits"]!;
  await trainer.step(f.batches[0]!);
  const second = (await trainer.predict({ x }))["logits"]!;
  expect(distance(first.data as Float32Array, second.data as Float32Array)).toBeGreaterThan(1e-4);
  await trainer.dispose();
});

test.each(["directml", "coreml"] as const)("%s is an error where onnxruntime-node lacks it, not a run on the CPU", async (device) => {
  const { folder: artifacts } = await fixture(`${MODELS[0]}-wasm`);
  await expect(Trainer.create({ artifacts, device })).rejects.toThrow(new RegExp(`step_model.* on ${device}: |${device}`));
});

test("rejects invalid batches and changes nothing", async () => {
  const { f, trainer } = await open("mlp-wasm");
  const { x, labels } = f.batches[0] as Record<"x" | "labels", { data: Float32Array; dims: number[]; dtype: string }>;
  const before = await trainer.exportCheckpoint();
  const cases: [object, RegExp][] = [
    [{ x }, /missing from the batch: labels/],
    [{ x, labels, image: x }, /unknown input: image\nhint: the inputs are x, labels/],
    [{ x: { data: x.data, dims: [10, 8] }, labels }, /'x' is float32\[batch, 10\], got shape \[10, 8\]/],
    [{ x: { data: x.data, dims: [8, 11] }, labels }, /'x' .*got 80 elements for shape \[8, 11\]/],
    [{ x: x.data.subarray(1), labels }, /'x' .*got 79 elements/],
    [{ x, labels: [1, 2, 3] }, /'labels' is int64\[batch\], but batch is 3 here and 8 in 'x'/],
    [{ x, labels: Array(8).fill(0.5) }, /'labels' is int64, got numbers with values that do not fit: 0.5/],
    [{ x, labels: "abcdefgh" }, /'labels' is int64\[batch\], got string/],
    [{ x: [[1, 2], [3]], labels: [1, 2] }, /'x' .*rows of unequal length/],
  ];
  for (const [batch, message] of cases) {
    const failure = trainer.step(batch as never);
    await expect(failure).rejects.toThrow(ShapeError);
    await expect(failure).rejects.toThrow(message);
  }
  expect(Buffer.compare(await trainer.exportCheckpoint(), before)).toBe(0);
  await trainer.dispose();
});

test("a runtime error names the model file and changes nothing", async () => {
  const { f, trainer } = await open("transformer-wasm");
  const before = await trainer.exportCheckpoint();
  const batch = { ...f.batches[0]!, tokens: Array(64).fill(1000) };
  await expect(trainer.step(batch)).rejects.toThrow(/step_model.onnx on node/);
  expect(Buffer.compare(await trainer.exportCheckpoint(), before)).toBe(0);
  const { loss } = await trainer.step(f.batches[0]!);
  expect(Math.abs(loss - f.expected.losses[0]!)).toBeLessThan(1e-4);
  await trainer.dispose();
});

test("gets and sets parameters by name", async () => {
  const { trainer } = await open("mlp-wasm");
  expect(trainer.parameters.map((p) => p.name)).toEqual(["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
  const values = Float32Array.of(1, 2, 3, 4);
  await trainer.setParameter("fc2.bias", values);
  values[0] = 9;
  expect([...((await trainer.getParameter("fc2.bias")).data as Float32Array)]).toEqual([1, 2, 3, 4]);
  await expect(trainer.setParameter("fc2.bias", [1, 2])).rejects.toThrow(/'fc2.bias' is float32\[4\], got shape \[2\]/);
  await expect(trainer.getParameter("fc3")).rejects.toThrow(/unknown parameter: 'fc3'/);
  await trainer.dispose();
});

function clusters(n: number) {
  const x = new Float32Array(n * 10);
  const labels = new Uint8Array(n);
  for (let i = 0; i < n; i++) {
    labels[i] = i % 4;
    for (let j = 0; j < 10; j++) x[10 * i + j] = Math.sin(i * 7.3 + j * 3.1) * 0.3 + (j % 4 === i % 4 ? 1 : 0);
  }
  return { x, labels };
}

test("fit trains with a schedule and reports validation metrics", async () => {
  const { trainer } = await open("mlp-wasm");
  const seen: Progress[] = [];
  const data = clusters(70);
  for await (const m of trainer.fit(data, { epochs: 6, batchSize: 16, schedule: cosine(0.02), validation: data })) seen.push(m);
  expect(seen.length).toBe(30);
  expect(seen.filter((m) => m.validation).map((m) => m.epoch)).toEqual([1, 2, 3, 4, 5, 6]);
  expect(seen[0]!.learningRate).toBeCloseTo(0.02);
  expect(seen.at(-1)!.learningRate).toBeCloseTo(0);
  expect(seen.at(-1)!.validation!["accuracy"]).toBeGreaterThan(0.95);
  expect(seen.at(-1)!.totalSteps).toBe(30);
  await trainer.dispose();
});

test("fit stops at a signal and when the loop breaks", async () => {
  const { trainer } = await open("mlp-wasm");
  const stop = new AbortController();
  let steps = 0;
  const run = async () => {
    for await (const _ of trainer.fit(clusters(64), { epochs: 100, batchSize: 8, signal: stop.signal })) {
      if (++steps === 5) stop.abort();
    }
  };
  await expect(run()).rejects.toThrow(/abort/i);
  expect(trainer.globalStep).toBe(8); // the pending multi-step call still completed
  for await (const m of trainer.fit(clusters(64), { batchSize: 8 })) if (m.step > 0) break;
  await expect(Trainer.create({ artifacts: "nowhere", signal: AbortSignal.abort() })).rejects.toThrow(/abort/i);
  await trainer.dispose();
});

test("concurrent calls run in order", async () => {
  const { f, trainer } = await open("mlp-wasm");
  const result = await Promise.all(f.batches.map((b) => trainer.step(b)));
  expect(distance(result.map((m) => m.loss), f.expected.losses)).toBeLessThan(1e-4);
  await trainer.dispose();
});

test("a disposed trainer throws DisposedError", async () => {
  const { f, trainer } = await open("mlp-wasm");
  await trainer.dispose();
  await trainer.dispose();
  await expect(trainer.step(f.batches[0]!)).rejects.toThrow(DisposedError);
});

test("200 rounds of create and dispose do not leak memory", async () => {
  const files = filesOf((await fixture("mlp-wasm")).folder);
  const { batches } = await fixture("mlp-wasm");
  const round = async (device: "node" | "wasm") => {
    const trainer = await Trainer.create({ artifacts: files, device, threads: 1 });
    await trainer.step(batches[0]!);
    await trainer.dispose();
  };
  for (const device of ["node", "wasm"] as const) {
    for (let i = 0; i < 50; i++) await round(device);
    const before = process.memoryUsage().rss;
    for (let i = 0; i < 200; i++) await round(device);
    const grown = (process.memoryUsage().rss - before) / 2 ** 20;
    expect(grown, `${device}: MiB after 200 rounds`).toBeLessThan(60);
  }
});
