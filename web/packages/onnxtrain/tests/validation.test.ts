import { mkdtemp } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { expect, test } from "vitest";
import { NonFiniteError, ShapeError, Trainer, type Progress } from "../src/index.js";
import { classLabels } from "../src/validation.js";
import { findModel } from "../src/manifest.js";
import { fixture, FIXTURES, runPython } from "./support.js";

const open = async (name = "mlp-wasm", device: "node" | "wasm" = "node") =>
  await Trainer.create({ artifacts: (await fixture(name)).folder, device, threads: 1 });

const rows = (n: number) => ({
  x: Float32Array.from({ length: 10 * n }, (_, i) => Math.sin(i)),
  labels: Int32Array.from({ length: n }, (_, i) => i % 4),
});

async function collect(run: AsyncIterable<Progress>): Promise<Progress[]> {
  const seen: Progress[] = [];
  try {
    for await (const m of run) seen.push(m);
  } catch (error) {
    throw Object.assign(error as Error, { seen });
  }
  return seen;
}

test.each(["node", "wasm"] as const)("reports the row of a label that is out of range, on %s", async (device) => {
  const trainer = await open("mlp-wasm", device);
  const before = await trainer.exportCheckpoint();
  const data = rows(900);
  data.labels[700] = 4;
  const message = /^'labels' must be class indices in \[0, 4\), got 4 at row 700$/;
  for (const failure of [
    () => trainer.step(data),
    () => trainer.evaluate(data),
    () => collect(trainer.fit({ x: data.x.slice(), labels: Array.from(data.labels) }, { stepsPerCall: 1, batchSize: 900 })),
  ]) {
    await expect(failure()).rejects.toThrow(ShapeError);
    await expect(failure()).rejects.toThrow(message);
  }
  expect(Buffer.compare(await trainer.exportCheckpoint(), before)).toBe(0);
  // With shuffled batches, the row is still that of the dataset.
  await expect(collect(trainer.fit(data, { batchSize: 32 }))).rejects.toThrow(message);
  data.labels[700] = -3;
  await expect(trainer.step(data)).rejects.toThrow(/^'labels' must be .*, got -3 at row 700$/);
  data.labels[700] = -100;
  expect((await trainer.step(data)).loss).toBeGreaterThan(0);
  await trainer.dispose();
});

test("with a list of losses, the error names the label, its number of classes and its row", async () => {
  const trainer = await Trainer.create({ artifacts: `${FIXTURES}/three-losses-wasm`, device: "node", threads: 1 });
  const data = { x: new Float32Array(40).fill(0.1), kinds: [0, 3, 1, 2], prices: [1, 2, 3, 4], colors: [0, 1, 2, 0] };
  expect((await trainer.step(data)).updated).toBe(true);
  await expect(trainer.step({ ...data, kinds: [0, 3, 4, 2] })).rejects.toThrow(/^'kinds' must be class indices in \[0, 4\), got 4 at row 2$/);
  await expect(trainer.step({ ...data, colors: [0, 3, 2, 0] })).rejects.toThrow(/^'colors' must be class indices in \[0, 3\), got 3 at row 1$/);
  const bad = { ...data, colors: Int32Array.of(0, 1, 2, -1) };
  await expect(collect(trainer.fit(bad, { batchSize: 2 }))).rejects.toThrow(/^'colors' must be class indices in \[0, 3\), got -1 at row 3$/);
  await trainer.dispose();
});

test("classLabels takes the number of classes from the logits", async () => {
  for (const name of ["mlp-wasm", "cnn-wasm", "transformer-wasm", "gru-wasm"]) {
    const trainer = await open(name);
    const result = classLabels(trainer.manifest, findModel(trainer.manifest, "step", ["wasm"])!);
    const scores = trainer.manifest.models.find((m) => m.role === "infer")!.outputs[0]!.shape;
    expect(result, name).toMatchObject({ labels: { name: "labels" }, classes: scores.at(-1) });
    await trainer.dispose();
  }
});

test.each([1, 8])("a NaN ends fit with %i steps per call and leaves the weights unchanged", async (stepsPerCall) => {
  const data = rows(96);
  data.x[10 * 45 + 3] = NaN;
  const trainer = await open();
  const failure = collect(trainer.fit(data, { batchSize: 8, shuffle: false, stepsPerCall }));
  const error = await failure.then(() => undefined, (e: Error & { seen: Progress[] }) => e);
  expect(error).toBeInstanceOf(NonFiniteError);
  expect(error!.message).toBe(
    "the loss of step 6 is nan (batch 6 of epoch 1)\n" +
      "  first tensor that is not finite: 'x' of the batch (float32[8, 10], 1 NaN, 0 infinite)\n" +
      "hint: the weights are unchanged since the previous step; check the batch or lower the learning rate",
  );
  expect(error!.seen.map((m) => m.step)).toEqual([1, 2, 3, 4, 5]);
  expect(trainer.globalStep).toBe(5);
  const good = await open();
  for await (const _ of good.fit({ x: data.x.slice(0, 400), labels: data.labels.slice(0, 40) }, { batchSize: 8, shuffle: false, stepsPerCall: 1 }));
  expect(Buffer.compare(await trainer.exportCheckpoint(), await good.exportCheckpoint())).toBe(0);
  await Promise.all([trainer.dispose(), good.dispose()]);
});

test("a step whose loss is not finite changes nothing and reports updated: false", async () => {
  const trainer = await open();
  const before = await trainer.exportCheckpoint();
  const batch = rows(8);
  batch.x[0] = Infinity;
  const result = await trainer.step(batch);
  expect(result.loss).toBeNaN();
  expect(result.updated).toBe(false);
  expect(trainer.globalStep).toBe(0);
  expect(Buffer.compare(await trainer.exportCheckpoint(), before)).toBe(0);
  expect((await trainer.step(rows(8))).updated).toBe(true);
  await trainer.dispose();
});

test("the error names a parameter that is not finite", async () => {
  const trainer = await open();
  await trainer.setParameter("fc2.bias", [1, NaN, Infinity, 1]);
  await expect(collect(trainer.fit(rows(16)))).rejects.toThrow(/parameter 'fc2.bias' \(float32\[4\], 1 NaN, 1 infinite\)/);
  await trainer.dispose();
});

test("rejects a batch with one value per channel for BatchNormalization", async () => {
  const folder = await mkdtemp(join(tmpdir(), "one-row-"));
  runPython(`import sys, onnx.parser, onnxtrain
model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]> g (float[batch, 2] x) => (float[batch, 2] y)
  <float[2] s = {1, 2}, float[2] b = {0, 0}, float[2] m = {0, 0}, float[2] v = {1, 1}> { y = BatchNormalization(x, s, b, m, v) }""")
onnxtrain.build(model, loss="mse", optimizer="sgd", target="wasm").save(sys.argv[1])`, folder);
  const trainer = await Trainer.create({ artifacts: folder, device: "node", threads: 1 });
  const [x, target] = trainer.inputs;
  const some = (n: number) => {
    const data = Float32Array.from({ length: 2 * n }, (_, i) => Math.sin(i));
    return { [x!]: data, [target!]: data };
  };
  await expect(trainer.step(some(1))).rejects.toThrow(/^BatchNormalization needs more than one value per channel in training, got batch = 1/);
  await expect(collect(trainer.fit(some(9), { batchSize: 4 }))).rejects.toThrow(ShapeError);
  expect(await collect(trainer.fit(some(9), { batchSize: 4, dropLast: true }))).not.toHaveLength(0);
  expect((await trainer.evaluate(some(1))).loss).toBeGreaterThan(0);
  await trainer.dispose();
});

const settings: [object, string][] = [
  [{ epochs: 0 }, "'epochs' must be a positive integer, got 0"],
  [{ epochs: -2 }, "'epochs' must be a positive integer, got -2"],
  [{ epochs: 1.5 }, "'epochs' must be a positive integer, got 1.5"],
  [{ epochs: "" }, "'epochs' must be a positive integer, got \"\""],
  [{ batchSize: 0 }, "'batchSize' must be a positive integer, got 0"],
  [{ stepsPerCall: NaN }, "'stepsPerCall' must be a positive integer, got NaN"],
  [{ schedule: () => -1 }, "the learning rate must be a number >= 0, got -1"],
  [{ schedule: () => NaN }, "the learning rate must be a number >= 0, got NaN"],
];

test.each(settings)("fit rejects %j without training", async (options, message) => {
  const trainer = await open();
  const before = await trainer.exportCheckpoint();
  await expect(collect(trainer.fit(rows(64), options))).rejects.toThrow(message);
  expect(Buffer.compare(await trainer.exportCheckpoint(), before)).toBe(0);
  await trainer.dispose();
});

test.each([-1, NaN, Infinity, ""])("step and fit reject a learning rate of %j", async (rate) => {
  const trainer = await open();
  const message = `the learning rate must be a number >= 0, got ${rate === "" ? '""' : rate}`;
  trainer.learningRate = rate as number;
  await expect(trainer.step(rows(8))).rejects.toThrow(message);
  await expect(collect(trainer.fit(rows(8)))).rejects.toThrow(message);
  expect(trainer.globalStep).toBe(0);
  trainer.learningRate = 0.01;
  expect((await trainer.step(rows(8))).step).toBe(1);
  await trainer.dispose();
});
