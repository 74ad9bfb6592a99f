import { mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, describe, expect, test } from "vitest";
import { CheckpointError, fileStore, readCheckpoint, Trainer, writeCheckpoint } from "../src/index.js";
import { bytes, distance, fixture, MODELS, runPython } from "./support.js";

const folder = mkdtempSync(join(tmpdir(), "onnxtrain-"));
afterAll(() => rmSync(folder, { recursive: true }));

describe.each(MODELS)("checkpoint of %s", (model) => {
  test("is byte-identical after a round trip through Node", async () => {
    const f = await fixture(`${model}-wasm`);
    const before = bytes(`${f.folder}/trained.safetensors`);
    const trainer = await Trainer.create({ artifacts: f.folder, device: "node", threads: 1 });
    await trainer.importCheckpoint(before);
    expect(trainer.properties).toEqual({ note: "grüße", ratio: 1 });
    const path = join(folder, `${model}.safetensors`);
    await trainer.save(path);
    expect(Buffer.compare(bytes(path), before)).toBe(0);
    await trainer.dispose();
  });

  test("Python resumes a run from Node", async () => {
    const f = await fixture(`${model}-wasm`);
    const half = await Trainer.create({ artifacts: f.folder, device: "node", seed: f.expected.seed, threads: 1 });
    for (const batch of f.batches.slice(0, 10)) await half.step(batch);
    const path = join(folder, `${model}-half.safetensors`);
    await half.save(path);
    await half.dispose();
    const printed = runPython(
      `
import json, sys
from onnxtrain.checkpoint import from_bytes
from onnxtrain import Trainer
folder, path = sys.argv[1:]
trainer = Trainer(folder, threads=1)
trainer.load(path)
batches, _ = from_bytes(open(folder + "/batches.safetensors", "rb").read())
first, label = trainer.inputs
print(json.dumps([trainer.step(batches[f"{i}/{first}"], batches[f"{i}/{label}"]).loss for i in range(10, 20)]))
`,
      f.folder, path,
    );
    expect(distance(JSON.parse(printed) as number[], f.expected.losses.slice(10))).toBeLessThan(1e-4);
  });
});

test("a resumed run is bit-identical to an uninterrupted run", async () => {
  const f = await fixture("cnn-wasm");
  const options = { artifacts: f.folder, device: "node", seed: 5, threads: 1 } as const;
  const whole = await Trainer.create(options);
  for (const batch of f.batches) await whole.step(batch);
  const first = await Trainer.create(options);
  for (const batch of f.batches.slice(0, 7)) await first.step(batch);
  const second = await Trainer.create({ ...options, seed: 0 });
  await second.importCheckpoint(await first.exportCheckpoint());
  for (const batch of f.batches.slice(7)) await second.step(batch);
  expect(Buffer.compare(await whole.exportCheckpoint(), await second.exportCheckpoint())).toBe(0);
  await Promise.all([whole, first, second].map((t) => t.dispose()));
});

test("rejects damaged checkpoints and changes nothing", async () => {
  const f = await fixture("mlp-wasm");
  const trainer = await Trainer.create({ artifacts: f.folder, device: "node", threads: 1 });
  const before = await trainer.exportCheckpoint();
  const good = bytes(`${f.folder}/trained.safetensors`);
  const flipped = good.slice();
  flipped[flipped.length - 1]! ^= 1;
  const cases: [Uint8Array, RegExp][] = [
    [flipped, /damaged, the sha256 does not match/],
    [good.slice(0, -4), /truncated, tensor '/],
    [good.slice(0, 100), /truncated in the header/],
    [good.slice(0, 3), /3 bytes long/],
    [new Uint8Array([...good, 0]), /1 bytes after the last tensor/],
    [bytes(`${f.folder}/step_model.onnx`), /not a checkpoint/],
    [bytes(`${f.folder}/batches.safetensors`), /a safetensors file without training progress/],
  ];
  for (const [data, message] of cases) {
    const failure = trainer.importCheckpoint(data);
    await expect(failure).rejects.toThrow(CheckpointError);
    await expect(failure).rejects.toThrow(message);
  }
  const other = bytes((await fixture("gru-wasm")).folder + "/trained.safetensors");
  await expect(trainer.importCheckpoint(other)).rejects.toThrow(/'fc1.weight' is missing/);
  expect(Buffer.compare(await trainer.exportCheckpoint(), before)).toBe(0);
  await trainer.dispose();
});

test("rejects damaged metadata, like Python, and changes nothing", async () => {
  const f = await fixture("mlp-wasm");
  const trainer = await Trainer.create({ artifacts: f.folder, device: "node", threads: 1 });
  const before = await trainer.exportCheckpoint();
  const good = bytes(`${f.folder}/trained.safetensors`);
  const replaced = (from: string, to: string) => {
    const data = Buffer.from(good);
    const at = data.lastIndexOf(from);
    expect(at).toBeGreaterThan(0);
    data.write(to, at, "latin1");
    return new Uint8Array(data);
  };
  const whole = await readCheckpoint(good);
  const meta = (key: string, text: string) => writeCheckpoint(whole.tensors, new Map([...whole.meta, [key, text]]));
  const cases: [Uint8Array, RegExp][] = [
    [replaced('{"onnxtrain":', '{"onnxtraim":'), /the metadata is damaged: 'onnxtrain' is missing/],
    [replaced('\\"sha256\\":\\"', '\\"sha257\\":\\"'), /damaged, the sha256 does not match/],
    [await meta("step", "1.5"), /the metadata is damaged: 'step' is 1.5, expected an integer >= 0/],
    [await meta("step", "-1"), /'step' is -1, expected an integer >= 0/],
    [await meta("step", '"3"'), /'step' is "3", expected an integer >= 0/],
    [await meta("seed", "0.5"), /'seed' is 0.5, expected an integer >= 0/],
    [await meta("lr", "[]"), /'lr' is \[\], expected a number/],
    [await meta("properties", "[1]"), /'properties' is \[1\], expected an object/],
  ];
  for (const [data, message] of cases) {
    const failure = trainer.importCheckpoint(data);
    await expect(failure).rejects.toThrow(CheckpointError);
    await expect(failure).rejects.toThrow(message);
  }
  expect(Buffer.compare(await trainer.exportCheckpoint(), before)).toBe(0);
  await trainer.dispose();
});

test("a failed save keeps the old file and leaves no other", async () => {
  const own = mkdtempSync(join(folder, "store-"));
  const store = fileStore();
  const path = join(own, "run");
  await store.write(path, Uint8Array.of(1, 2, 3));
  await expect(store.write(join(own, "no", "such"), Uint8Array.of(1))).rejects.toThrow(/cannot be written/);
  // An interrupted write leaves a temporary file with another name.
  writeFileSync(`${path}.1.part`, "half");
  expect([...(await store.read(path))]).toEqual([1, 2, 3]);
  await store.write(path, Uint8Array.of(4));
  expect([...(await store.read(path))]).toEqual([4]);
  expect(readdirSync(own).sort()).toEqual(["run", "run.1.part"]);
  await expect(store.read(join(own, "none"))).rejects.toThrow(CheckpointError);
});

test("Python reads tensors of every dtype and writes the same bytes", async () => {
  const tensors = new Map([
    ["b/ü", { dtype: "bool", dims: [2], data: Uint8Array.of(1, 0) }],
    ["f", { dtype: "float32", dims: [1, 2], data: Float32Array.of(1.5, -0) }],
    ["h", { dtype: "float16", dims: [], data: Uint16Array.of(0x3c00) }],
    ["d", { dtype: "float64", dims: [0], data: new Float64Array(0) }],
    ["i", { dtype: "int64", dims: [1], data: BigInt64Array.of(-(2n ** 62n)) }],
    ["😀", { dtype: "int8", dims: [1], data: Int8Array.of(-1) }],
    ["\uffff", { dtype: "int8", dims: [1], data: Int8Array.of(-2) }],
  ]);
  const meta = new Map([["lr", "1e-05"], ["name", '"gr\\u00fc\\u00dfe"'], ["a", "[1.0,2]"]]);
  const data = await writeCheckpoint(tensors, meta);
  const path = join(folder, "types");
  writeFileSync(path, data);
  runPython(
    "import sys; from onnxtrain.checkpoint import *; p = sys.argv[1]; t, m = load_checkpoint(p); save_checkpoint(p + '2', t, m)",
    path,
  );
  expect(Buffer.compare(bytes(`${path}2`), data)).toBe(0);
  const again = await readCheckpoint(data);
  expect(again.meta).toEqual(meta);
  expect(again.tensors.get("i")).toEqual(tensors.get("i"));
  expect(again.tensors.size).toBe(tensors.size);
});

test("a run that resumed from another build's checkpoint belongs to this build, also in Python", async () => {
  runPython(`import sys, numpy as np, onnx.parser, onnxtrain
def build(kind):
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]> g (float[batch, 2] x) => (float[batch, 2] y)
      <float[2, 2] w = {1, 2, 3, 4}> { h = MatMul(x, w) y = KIND(h) }""".replace("KIND", kind))
    return onnxtrain.build(model, loss="mse", optimizer="sgd", target="wasm")
build("Tanh").save(sys.argv[1] + "/here")
other = onnxtrain.Trainer(build("Sigmoid"))
other.step(np.ones((3, 2), np.float32), np.ones((3, 2), np.float32))
other.save(sys.argv[1] + "/there.safetensors")`, folder);
  const trainer = await Trainer.create({ artifacts: join(folder, "here"), device: "node", threads: 1 });
  await trainer.importCheckpoint(bytes(join(folder, "there.safetensors")));
  const [x, target] = trainer.inputs;
  await trainer.step({ [x!]: Float32Array.of(1, 2), [target!]: Float32Array.of(0, 1) });
  await trainer.save(join(folder, "resumed.safetensors"));
  const output = runPython(`import sys, onnxtrain
trainer = onnxtrain.Trainer(sys.argv[1] + "/here")
print(sorted(trainer.load(sys.argv[1] + "/resumed.safetensors")), trainer.global_step)`, folder);
  expect(output).toContain("'step'] 2");
  expect(output).not.toContain("graphs");
  // The graph digests of this build are preserved.
  runPython(`import sys, onnxtrain; onnxtrain.Trainer(sys.argv[1] + "/here").save(sys.argv[1] + "/own.safetensors")`, folder);
  await trainer.importCheckpoint(bytes(join(folder, "own.safetensors")));
  await trainer.step({ [x!]: Float32Array.of(1, 2), [target!]: Float32Array.of(0, 1) });
  expect(Buffer.from(await trainer.exportCheckpoint()).toString("latin1")).toContain("graphs");
  await trainer.dispose();
});
