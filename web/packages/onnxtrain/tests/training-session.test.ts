import { readFileSync } from "node:fs";
import * as ort from "onnxruntime-common";
import { expect, test } from "vitest";
import type { HostTensor } from "../src/dtypes.js";
import { Trainer, TrainingSession } from "../src/index.js";
import defaultExport, * as aliased from "../src/training/node.js";
import { bytes, distance, fixture, FIXTURES, type Fixture } from "./support.js";

const filesFor = (f: Fixture) => ({
  checkpointState: bytes(`${f.folder}/checkpoint`),
  trainModel: `${f.folder}/training_model.onnx`,
  optimizerModel: `${f.folder}/optimizer_model.onnx`,
  evalModel: bytes(`${f.folder}/eval_model.onnx`),
});
const tensors = (batch: object, order = 1): Record<string, ort.Tensor> =>
  Object.fromEntries(
    (Object.entries(batch) as [string, HostTensor][])
      .sort(([a], [b]) => (a < b ? -order : order))
      .map(([n, t]) => [n, new ort.Tensor(t.dtype as "float32", t.data as Float32Array, t.dims)]),
  );

test.each(["node", "wasm"] as const)("the onnxruntime-web/training loop matches Python on %s, with any order of feeds", async (device) => {
  const f = await fixture("mlp-wasm");
  const session = await TrainingSession.create(filesFor(f), { device, threads: 1 });
  expect(session.trainingInputNames).toEqual(["x", "labels"]);
  expect(session.trainingOutputNames).toEqual(["loss", "accuracy", "logits"]);
  const losses: number[] = [];
  for (const [i, batch] of f.batches.entries()) {
    const result = await session.runTrainStep(tensors(batch, i % 2 ? 1 : -1));
    losses.push((result["loss"]!.data as Float32Array)[0]!);
    await session.runOptimizerStep();
    await session.lazyResetGrad();
  }
  expect(distance(losses, f.expected.losses)).toBeLessThan(1e-4);
  const { loss, ...rest } = await session.runEvalStep(tensors(f.batches[0]!), ["loss"]);
  expect(Object.keys(rest)).toEqual([]);
  expect((loss!.data as Float32Array)[0]).toBeCloseTo(f.expected.eval, 4);
  const trainer = await Trainer.create({ artifacts: f.folder, device: "node", threads: 1 });
  await trainer.importCheckpoint(await session.exportCheckpoint());
  expect(trainer.globalStep).toBe(20);
  await trainer.dispose();
  await session.release();
});

test("gets and sets parameters as one vector", async () => {
  const f = await fixture("cnn-wasm");
  const session = await TrainingSession.create(filesFor(f), { threads: 1 });
  const size = await session.getParametersSize();
  expect(size).toBe(6 * 9 + 6 + 6 + 6 + 96 * 4 + 4);
  expect(await session.getParametersSize(false)).toBe(size + 12);
  const before = (await session.getContiguousParameters()).data as Float32Array;
  const doubled = before.map((v) => 2 * v);
  await session.loadParametersBuffer(new Uint8Array(doubled.buffer));
  expect((await session.getContiguousParameters()).data).toEqual(doubled);
  await expect(session.loadParametersBuffer(new Uint8Array(8))).rejects.toThrow(`8 bytes, expected ${4 * size}`);
  await session.release();
});

test("onnxruntime-web/training, aliased, has ONNX Runtime's exports and results under generated loss names", async () => {
  const f = await fixture("mlp-wasm");
  expect(defaultExport.TrainingSession).toBe(aliased.TrainingSession);
  expect(typeof aliased.env).toBe("object");
  expect(typeof aliased.InferenceSession.create).toBe("function");
  const session = await aliased.TrainingSession.create(filesFor(f), { executionProviders: ["wasm"], threads: 1 });
  const feeds = Object.fromEntries(Object.entries(tensors(f.batches[0]!)).map(([n, t]) => [n, new aliased.Tensor(t.type as "float32", t.data as Float32Array, t.dims)]));
  const results = await session.runTrainStep(feeds);
  expect(results["loss"]).toBeInstanceOf(aliased.Tensor);
  expect(results["onnx::loss::8"]).toBe(results["loss"]);
  expect(results["onnx::loss"]).toBeUndefined();
  expect(Object.keys(await session.runEvalStep(feeds, ["onnx::reducemean_output::3"]))).toEqual(["loss"]);
  expect((await session.runEvalStep(feeds, { "onnx::loss::8": null }))["onnx::loss::8"]!.dims).toEqual([]);
  expect((await session.runEvalStep(feeds, ["logits"]))["onnx::loss::8"]).toBeUndefined();
  await expect(session.runEvalStep(feeds, ["onnx::loss"])).rejects.toThrow("unknown output: 'onnx::loss' (expected one of loss, accuracy, logits)");
  await session.release();
});

test("a batch with NaN changes no parameter, and the next batch trains as if it had not been there", async () => {
  const f = await fixture("cnn-wasm");
  const bad = tensors(f.batches[0]!);
  (bad["x"]!.data as Float32Array)[0] = NaN;
  const run = async (...batches: Record<string, ort.Tensor>[]) => {
    const session = await TrainingSession.create(filesFor(f), { threads: 1 });
    const losses: number[] = [];
    for (const batch of batches) {
      losses.push((await session.runTrainStep(batch))["loss"]!.data[0] as number);
      await session.runOptimizerStep();
      await session.lazyResetGrad();
    }
    const vector = (await session.getContiguousParameters(false)).data as Float32Array;
    await session.release();
    return { losses, vector };
  };
  const good = tensors(f.batches[1]!);
  const [none, broken, once, mixed] = [await run(), await run(bad), await run(good), await run(bad, good)];
  expect(broken.losses[0]).toBeNaN();
  expect(broken.vector).toEqual(none.vector);
  expect(mixed.losses[1]).toBe(once.losses[0]);
  expect(distance(mixed.vector, once.vector)).toBeLessThan(1e-6);
  expect(distance(once.vector, none.vector)).toBeGreaterThan(1e-4);
});

test("gradients accumulate until they are reset, and the learning rate is used", async () => {
  const f = await fixture("cnn-wasm");
  const make = () => TrainingSession.create(filesFor(f), { threads: 1 });
  const moved = async (times: number, lr: number, reset: boolean) => {
    const session = await make();
    session.learningRate = lr;
    const before = (await session.getContiguousParameters()).data as Float32Array;
    for (let i = 0; i < times; i++) {
      if (reset) await session.lazyResetGrad();
      await session.runTrainStep(tensors(f.batches[0]!));
    }
    await session.runOptimizerStep();
    const after = (await session.getContiguousParameters()).data as Float32Array;
    await session.release();
    return distance(before, after);
  };
  const once = await moved(1, 0.1, false);
  expect((await moved(1, 0.2, false)) / once).toBeCloseTo(2, 2);
  expect((await moved(2, 0.1, false)) / once).toBeGreaterThan(1.3);
  expect(await moved(1, 0, false)).toBe(0);
  expect((await moved(2, 0.1, true)) / once).toBeLessThan(1.3);
});

test("errors match those of onnxruntime-web/training", async () => {
  const f = await fixture("mlp-wasm");
  const { checkpointState, trainModel } = filesFor(f);
  const session = await TrainingSession.create({ checkpointState, trainModel }, { threads: 1 });
  await expect(session.runOptimizerStep()).rejects.toThrow("This TrainingSession has no OptimizerModel loaded.");
  await expect(session.runEvalStep({})).rejects.toThrow("This TrainingSession has no EvalModel loaded.");
  expect(session.evalInputNames).toEqual([]);
  const batch = tensors(f.batches[0]!);
  await expect(session.runTrainStep({ x: batch["x"]! })).rejects.toThrow(/missing from the batch: labels/);
  await expect(session.runTrainStep(batch, [])).rejects.toThrow(TypeError);
  await expect(session.runTrainStep(batch, ["nothing"])).rejects.toThrow(RangeError);
  expect(Object.keys(await session.runTrainStep(batch, { loss: null }))).toEqual(["loss"]);
  await session.release();
});

test("files of generate_artifacts train, and frozen parameters keep their position in the vector", async () => {
  const folder = `${FIXTURES}/ort-training`;
  const expected = JSON.parse(readFileSync(`${folder}/expected.json`, "utf8")) as Record<"vector" | "losses" | "x" | "labels", number[]>;
  const session = await TrainingSession.create(
    {
      checkpointState: `${folder}/checkpoint`, trainModel: `${folder}/training_model.onnx`,
      optimizerModel: `${folder}/optimizer_model.onnx`, evalModel: `${folder}/eval_model.onnx`,
    },
    { threads: 1 },
  );
  const vector = (await session.getContiguousParameters(false)).data as Float32Array;
  expect([...vector]).toEqual(expected.vector);
  expect(await session.getParametersSize(false)).toBe(expected.vector.length);
  expect(await session.getParametersSize()).toBe(expected.vector.length - 48);
  const feeds = {
    x: new ort.Tensor("float32", Float32Array.from(expected.x), [8, 10]),
    labels: new ort.Tensor("int64", BigInt64Array.from(expected.labels, BigInt), [8]),
  };
  const losses: number[] = [];
  for (let i = 0; i < 5; i++) {
    losses.push(((await session.runTrainStep(feeds))[session.trainingOutputNames[0]!]!.data as Float32Array)[0]!);
    await session.runOptimizerStep();
    await session.lazyResetGrad();
  }
  expect(distance(losses, expected.losses)).toBeLessThan(1e-5);
  // The vector includes the frozen parameters.
  await session.loadParametersBuffer(new Uint8Array(vector.buffer), false);
  expect([...((await session.getContiguousParameters(false)).data as Float32Array)]).toEqual(expected.vector);
  await session.release();
});
