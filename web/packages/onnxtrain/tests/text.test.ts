import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { beforeAll, describe, expect, test } from "vitest";
import { Artifacts, parseManifest, planMemory, readCheckpoint, Trainer, type Batch } from "../src/index.js";
import { Sha256 } from "../src/sha256.js";
import { exportOnnxAdapter, exportPeft, generate, generateText, LanguageModel, tokenBatch, type TokenizerLike } from "../src/text/index.js";
import { bytes, distance, FIXTURES, runPython } from "./support.js";

const FOLDER = `${FIXTURES}/lm`;
const expected = JSON.parse(readFileSync(`${FOLDER}/expected.json`, "utf8")) as {
  losses: number[]; before: number[]; after: number[]; prompt: number[]; seed: number;
};
let batches: Batch[];
beforeAll(async () => {
  const { tensors } = await readCheckpoint(bytes(`${FOLDER}/batches.safetensors`));
  batches = expected.losses.map((_, i) =>
    Object.fromEntries(["input_ids", "attention_mask", "labels"].map((n) => [n, tensors.get(`${i}/${n}`)!])),
  );
});
const create = (device: "node" | "wasm") => Trainer.create({ artifacts: FOLDER, device, seed: expected.seed, threads: 1 });
const collected = async <T>(of: AsyncIterable<T>): Promise<T[]> => {
  const result: T[] = [];
  for await (const x of of) result.push(x);
  return result;
};

describe.each(["node", "wasm"] as const)("adapters on %s", (device) => {
  test("losses and generated tokens match Python, before and after training", async () => {
    const trainer = await create(device);
    expect(await collected(generate(trainer, expected.prompt, { maxTokens: 8 }))).toEqual(expected.before);
    const losses: number[] = [];
    for (const batch of batches) losses.push((await trainer.step(batch)).loss);
    expect(losses.length).toBe(12);
    expect(distance(losses, expected.losses)).toBeLessThan(1e-3);
    await trainer.importCheckpoint(bytes(`${FOLDER}/trained.safetensors`));
    expect(await collected(generate(trainer, expected.prompt, { maxTokens: 8 }))).toEqual(expected.after);
    await trainer.dispose();
  });

  test("a checkpoint contains the adapters only, and resumed training is bit-identical", async () => {
    const trainer = await create(device);
    for (const batch of batches.slice(0, 6)) await trainer.step(batch);
    const saved = await trainer.exportCheckpoint();
    const { tensors } = await readCheckpoint(saved);
    const names = new Set(trainer.parameters.map((p) => p.name));
    expect([...tensors.keys()].every((n) => names.has(n) || n.startsWith("optim/"))).toBe(true);
    const rest: number[] = [];
    for (const batch of batches.slice(6)) rest.push((await trainer.step(batch)).loss);
    const end = await trainer.exportCheckpoint();
    await trainer.dispose();
    const again = await create(device);
    await again.importCheckpoint(saved);
    const other: number[] = [];
    for (const batch of batches.slice(6)) other.push((await again.step(batch)).loss);
    expect(other).toEqual(rest);
    expect(Buffer.from(await again.exportCheckpoint()).equals(Buffer.from(end))).toBe(true);
    await again.dispose();
  });
});

describe("exports for other tools", () => {
  let trainer: Trainer;
  beforeAll(async () => {
    trainer = await create("node");
    await trainer.importCheckpoint(bytes(`${FOLDER}/trained.safetensors`));
    return () => trainer.dispose();
  });

  test("PEFT files are identical to Python's", async () => {
    const files = await exportPeft(trainer, { baseModel: "ours" });
    expect(Buffer.from(files["adapter_model.safetensors"]).equals(readFileSync(`${FOLDER}/peft/adapter_model.safetensors`))).toBe(true);
    const config = JSON.parse(new TextDecoder().decode(files["adapter_config.json"])) as object;
    expect(config).toEqual(JSON.parse(readFileSync(`${FOLDER}/peft/adapter_config.json`, "utf8")));
  });

  test("ONNX Runtime loads the .onnx_adapter file: same tensors and logits as Python's", async () => {
    const folder = mkdtempSync(join(tmpdir(), "adapter-"));
    writeFileSync(join(folder, "ours.onnx_adapter"), await exportOnnxAdapter(trainer));
    const output = runPython(
      `
import json, sys
import numpy as np
import onnxruntime as ort
folder, fixtures = sys.argv[1:]
def read(path):
    file = ort.AdapterFormat.read_adapter(path)  # holds the memory
    return {n: np.array(v.numpy()) for n, v in file.get_parameters().items()}
ours, theirs = read(folder + "/ours.onnx_adapter"), read(fixtures + "/lm/style.onnx_adapter")
same = ours.keys() == theirs.keys() and all(np.array_equal(ours[n], theirs[n]) for n in ours)
ort.set_default_logger_severity(3)
session = ort.InferenceSession(fixtures + "/lm-base/model.lora.onnx")
ids = np.array([[5, 9, 12]], np.int64)
feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
for x in session.get_inputs():
    if x.name.startswith("past"):
        feeds[x.name] = np.zeros((1, 2, 0, 16), np.float32)
def logits(path):
    adapter = ort.LoraAdapter()
    adapter.Load(path)
    options = ort.RunOptions()
    options.add_active_adapter(adapter)
    return session.run(["logits"], feeds, run_options=options)[0]
a, b = logits(folder + "/ours.onnx_adapter"), logits(fixtures + "/lm/style.onnx_adapter")
base = session.run(["logits"], feeds)[0]
print(json.dumps([len(ours), same, bool(np.array_equal(a, b)), bool(np.abs(a - base).max() > 1e-3)]))
`,
      folder, FIXTURES,
    );
    rmSync(folder, { recursive: true });
    expect(JSON.parse(output)).toEqual([28, true, true, true]);
  });

  test("rejects artifacts without adapters", async () => {
    const plain = await Trainer.create({ artifacts: `${FIXTURES}/mlp-wasm`, device: "node" });
    await expect(exportPeft(plain)).rejects.toThrow(/have no adapters\nhint: build them from onnxtrain.lora/);
    await expect(collected(generate(plain, [1]))).rejects.toThrow(/not a language model: expected an input 'input_ids', got x/);
    await plain.dispose();
  });
});

describe("generation", () => {
  let trainer: Trainer;
  beforeAll(async () => {
    trainer = await create("node");
    return () => trainer.dispose();
  });
  const drawn = (options: object) => collected(generate(trainer, expected.prompt, { maxTokens: 6, temperature: 1, ...options }));

  test("sampling depends on the seed; a small topP is greedy", async () => {
    expect(await drawn({ seed: 1 })).toEqual(await drawn({ seed: 1 }));
    expect(await drawn({ seed: 1 })).not.toEqual(await drawn({ seed: 2 }));
    expect(await drawn({ seed: 3, topP: 1e-6 })).toEqual(expected.before.slice(0, 6));
  });

  test("ends at a stop token, at a signal, and when the loop breaks", async () => {
    expect(await collected(generate(trainer, expected.prompt, { stop: expected.before[0]! }))).toEqual([]);
    const controller = new AbortController();
    const seen: number[] = [];
    const loop = async () => {
      for await (const token of generate(trainer, expected.prompt, { signal: controller.signal })) {
        seen.push(token);
        if (seen.length === 2) controller.abort();
      }
    };
    await expect(loop()).rejects.toThrow(/abort/i);
    expect(seen.length).toBe(2);
    for await (const _ of generate(trainer, expected.prompt)) break;
    await trainer.step(batches[0]!); // the trainer still works
  });

  test("rejects invalid options", async () => {
    await expect(collected(generate(trainer, []))).rejects.toThrow(/prompt is empty/);
    await expect(drawn({ topP: 0 })).rejects.toThrow(/topP in \(0, 1\]/);
    await expect(drawn({ maxTokens: 0 })).rejects.toThrow(/maxTokens/);
  });

  test("generateText yields complete characters only", async () => {
    // Two tokens form one character: the first alone decodes to a replacement character.
    const tokenizer: TokenizerLike = {
      encode: () => ({ ids: expected.prompt }),
      decode: (ids) => ids.map((_, i) => (i % 2 ? "é" : i === ids.length - 1 ? "\ufffd" : "")).join(""),
    };
    expect(await collected(generateText(trainer, "x", { tokenizer, maxTokens: 4 }))).toEqual(["é", "é"]);
  });

  test("models with and without a KV cache generate the same tokens", async () => {
    const base = `${FIXTURES}/lm-base`;
    const weights = { "model.onnx.data": bytes(`${base}/model.onnx.data`) };
    for (const device of ["node", "wasm"] as const) {
      const model = await LanguageModel.open({ model: `${base}/model.onnx`, weights, device, threads: 1 });
      expect(await collected(generate(model, expected.prompt, { maxTokens: 8 }))).toEqual(expected.before);
      await model.release();
    }
    const fresh = await create("node");
    const exported = await fresh.exportModel();
    const model = await LanguageModel.open({ model: exported, weights: { "weights.bin": bytes(`${FOLDER}/weights.bin`) }, device: "wasm" });
    expect(await collected(generate(model, expected.prompt, { maxTokens: 8 }))).toEqual(expected.before);
    await Promise.all([model.release(), fresh.dispose()]);
  });
});

test("tokenBatch adds the inputs of the model", () => {
  const batch = tokenBatch([[1, 2, 3], { ids: [4], labels: [-100] }], ["input_ids", "attention_mask", "labels"], { pad: 9, multiple: 4 });
  const rows = (name: string) => Array.from((batch[name] as { data: BigInt64Array }).data, Number);
  expect(rows("input_ids")).toEqual([1, 2, 3, 9, 4, 9, 9, 9]);
  expect(rows("attention_mask")).toEqual([1, 1, 1, 0, 1, 0, 0, 0]);
  expect(rows("labels")).toEqual([1, 2, 3, -100, -100, -100, -100, -100]);
  expect(() => tokenBatch([[1]], ["past_key_values.0.key"])).toThrow(/cannot build the inputs past_key_values.0.key from token ids/);
});

test("the memory limit is checked before anything is downloaded", async () => {
  const manifest = parseManifest(readFileSync(`${FOLDER}/manifest.json`, "utf8"));
  const small = planMemory(manifest, { batch_size: 1, sequence_length: 16 })!;
  const large = planMemory(manifest, { batch_size: 1, sequence_length: 4096 })!;
  expect(small.fits).toBe(true);
  expect(large.parts["activations"]! / small.parts["activations"]!).toBeGreaterThan(256);
  const sizes = { batch_size: 8, sequence_length: 8192 };
  const files = new Map([["manifest.json", bytes(`${FOLDER}/manifest.json`)], ["checkpoint", bytes(`${FOLDER}/checkpoint`)]]);
  const refused = Trainer.create({ artifacts: files, device: "wasm", sizes });
  await expect(refused).rejects.toThrow(/^training needs about \d+ MB with batch_size = 8, sequence_length = 8192, the limit is 4295 MB.*\nhint: use smaller batches/s);
  await expect(refused).rejects.toMatchObject({ name: "TooLargeError" });
  // A batch that is larger than the limit is rejected too, unless the limit is disabled.
  const strict = await Trainer.create({ artifacts: FOLDER, device: "wasm", threads: 1, memoryLimit: small.heap });
  await expect(strict.step(batches[0]!)).rejects.toMatchObject({ name: "TooLargeError" });
  await strict.dispose();
  const unlimited = await Trainer.create({ artifacts: FOLDER, device: "wasm", threads: 1, sizes, memoryLimit: Infinity });
  expect((await unlimited.step(batches[0]!)).loss).toBeCloseTo(expected.losses[0]!, 3);
  await unlimited.dispose();
});

test("the incremental digest matches the digest of the whole", () => {
  const data = new Uint8Array(1000).map((_, i) => i * 7);
  for (const cut of [0, 1, 63, 64, 65, 129, 999]) {
    const result = new Sha256().add(data.subarray(0, cut)).add(data.subarray(cut, cut + 1)).add(data.subarray(cut + 1)).digest();
    expect(result).toBe(createHash("sha256").update(data).digest("hex"));
  }
});

test("onProgress reports the weights file, and a damaged one is rejected", async () => {
  const files = new Map(["manifest.json", "weights.bin"].map((n) => [n, bytes(`${FOLDER}/${n}`)]));
  const output: number[] = [];
  const artifacts = await Artifacts.load(files, { onProgress: ({ loaded }) => output.push(loaded) });
  expect(await artifacts.data("weights.bin")).toBe(files.get("weights.bin"));
  expect(output).toEqual([files.get("weights.bin")!.length]);
  const whole = new File([files.get("weights.bin")! as Uint8Array<ArrayBuffer>], "weights.bin");
  const parts = [new File([files.get("manifest.json")! as Uint8Array<ArrayBuffer>], "manifest.json")];
  expect(await (await Artifacts.load([...parts, whole])).data("weights.bin")).toBe(whole);
  const cut = new File([whole.slice(1)], "weights.bin");
  await expect((await Artifacts.load([...parts, cut])).data("weights.bin")).rejects.toThrow(/sha256 does not match the manifest/);
});
