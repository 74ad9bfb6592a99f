import type { Server } from "node:http";
import type { Browser } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { Trainer } from "../../src/index.js";
import { bytes, distance, fixture, MODELS } from "../support.js";
import { openPage, serve, start, train } from "./page.js";

let browser: Browser;
let isolated: { server: Server; address: string };
let plain: { server: Server; address: string };
beforeAll(async () => {
  [browser, isolated, plain] = await Promise.all([start(), serve(true), serve(false)]);
});
afterAll(async () => {
  await browser?.close();
  isolated?.server.close();
  plain?.server.close();
});

test.each(MODELS)("%s matches Python in a worker", async (model) => {
  const f = await fixture(`${model}-wasm`);
  const { page, pageErrors } = await openPage(browser, isolated.address);
  const result = await train(page, `${model}-wasm`, { device: "wasm", seed: f.expected.seed });
  expect(result.device).toBe("wasm");
  expect(distance(result.losses, f.expected.losses)).toBeLessThan(1e-4);
  expect(distance(result.accuracies, f.expected.accuracies)).toBeLessThan(1e-6);
  expect(Math.abs(result.evaluated - f.expected.eval)).toBeLessThan(1e-4);
  expect(distance(result.logits, f.predictions.get("logits")!.data as Float32Array)).toBeLessThan(1e-3);
  expect(pageErrors).toEqual([]);
  // The page's checkpoint is byte-identical after loading it in Node.
  const trainer = await Trainer.create({ artifacts: f.folder, device: "node", threads: 1 });
  await trainer.importCheckpoint(Uint8Array.from(result.checkpoint));
  expect(trainer.globalStep).toBe(20 / trainer.manifest.accumulate);
  expect([...(await trainer.exportCheckpoint())]).toEqual(result.checkpoint);
  await trainer.dispose();
  await page.close();
});

describe.each([[true, true], [false, true], [true, false], [false, false]])("headers %s, worker %s", (headers, worker) => {
  test("trains", async () => {
    const f = await fixture("mlp-wasm");
    const { page } = await openPage(browser, (headers ? isolated : plain).address);
    expect(await page.evaluate(() => crossOriginIsolated)).toBe(headers);
    const result = await train(page, "mlp-wasm", { device: "wasm", worker, threads: 2 });
    expect(distance(result.losses, f.expected.losses)).toBeLessThan(1e-4);
    await page.close();
  });
});

test("a program of onnxruntime-web/training runs in a page, with the old module name mapped to ours", async () => {
  const f = await fixture("mlp-wasm");
  const { page, pageErrors } = await openPage(browser, isolated.address);
  await page.addScriptTag({ type: "module", content: 'import * as ort from "onnxruntime-web/training"; globalThis.ort = ort;' });
  await page.waitForFunction(() => "ort" in globalThis);
  const losses = await page.evaluate(async () => {
    const { ort } = globalThis as unknown as { ort: typeof import("../../src/training/index.js") };
    ort.env.wasm.numThreads = 1;
    const { tensors } = await onnxtrain.readCheckpoint(new Uint8Array(await (await fetch("/fixtures/mlp-wasm/batches.safetensors")).arrayBuffer()));
    const at = (file: string) => `/fixtures/mlp-wasm/${file}`;
    const session = await ort.TrainingSession.create({
      checkpointState: at("checkpoint"), trainModel: at("training_model.onnx"), optimizerModel: at("optimizer_model.onnx"), evalModel: at("eval_model.onnx"),
    });
    const losses: number[] = [];
    for (let i = 0; tensors.has(`${i}/x`); i++) {
      const [x, labels] = [tensors.get(`${i}/x`)!, tensors.get(`${i}/labels`)!];
      const results = await session.runTrainStep({
        x: new ort.Tensor("float32", x.data as Float32Array, x.dims), labels: new ort.Tensor("int64", labels.data as BigInt64Array, labels.dims),
      });
      losses.push(results["onnx::loss::8"]!.data[0] as number);
      await session.runOptimizerStep();
      await session.lazyResetGrad();
    }
    await session.release();
    return losses;
  });
  expect(distance(losses, f.expected.losses)).toBeLessThan(1e-4);
  expect(pageErrors).toEqual([]);
  await page.close();
});

test("without a GPU, training falls back to wasm and reports it", async () => {
  const { page } = await openPage(browser, isolated.address);
  const result = await train(page, "mlp-webgpu", { device: "webgpu" });
  expect(result.device).toBe("wasm");
  expect(result.messages.length).toBe(1);
  expect(result.messages[0]).toMatch(/falling back from WebGPU to wasm: /);
  const other = await train(page, "mlp-wasm", { device: "webgpu" });
  expect(other.messages[0]).toMatch(/were not built with target="webgpu"/);
  await page.close();
});

test.each(["private files", "IndexedDB"])("checkpoints survive a reload in %s, and an interrupted save keeps the old one", async (kind) => {
  const { page } = await openPage(browser, isolated.address);
  const first = await page.evaluate(async (kind) => {
    const { Trainer, databaseStore, privateFileStore } = onnxtrain;
    const store = kind === "IndexedDB" ? databaseStore() : privateFileStore();
    const trainer = await Trainer.create({ artifacts: "/fixtures/mlp-wasm", device: "wasm", store });
    await trainer.setParameter("fc2.bias", [1, 2, 3, 4]);
    await trainer.save("my run/1");
    const { data } = await trainer.getParameter("fc1.weight");
    await trainer.setParameter("fc2.bias", [0, 0, 0, 0]);
    // A page that is closed during a write never closes the stream.
    if (kind !== "IndexedDB") {
      const folder = await (await navigator.storage.getDirectory()).getDirectoryHandle("onnxtrain");
      const handle = await folder.getFileHandle(`${encodeURIComponent("my run/1")}.safetensors`);
      await (await handle.createWritable()).write("half");
    }
    return [...(data as Float32Array)];
  }, kind);
  await page.reload();
  const second = await page.evaluate(async (kind) => {
    const { Trainer, databaseStore, privateFileStore } = onnxtrain;
    const store = kind === "IndexedDB" ? databaseStore() : privateFileStore();
    const trainer = await Trainer.create({ artifacts: "/fixtures/mlp-wasm", device: "wasm", store });
    await trainer.load("my run/1");
    const absent = await trainer.load("other").catch((error: Error) => `${error.name}: ${error.message}`);
    const read = async (name: string) => [...((await trainer.getParameter(name)).data as Float32Array)];
    const result = { bias: await read("fc2.bias"), weight: await read("fc1.weight"), absent };
    await trainer.dispose();
    return result;
  }, kind);
  expect(second.bias).toEqual([1, 2, 3, 4]);
  expect(second.weight).toEqual(first);
  expect(second.absent).toMatch(/^CheckpointError: 'other': cannot be read/);
  await page.close();
});

test("errors from the worker keep their class and message", async () => {
  const { page } = await openPage(browser, isolated.address);
  const result = await page.evaluate(async () => {
    const { Trainer, ShapeError, RuntimeError, ArtifactError } = onnxtrain;
    const caught = async (work: Promise<unknown>, kind: new () => Error) =>
      await work.then(() => "nothing", (e: Error) => `${e instanceof kind} ${e.message}`);
    const trainer = await Trainer.create({ artifacts: "/fixtures/transformer-wasm", device: "wasm" });
    const labels = [0, 1];
    const results = [
      await caught(trainer.step({ tokens: new Uint8Array(17), labels }), ShapeError),
      await caught(trainer.step({ tokens: new Uint8Array(16).fill(99), labels }), RuntimeError),
      await caught(Trainer.create({ artifacts: "/fixtures/none", device: "wasm" }), ArtifactError),
    ];
    const after = await trainer.step({ tokens: new Uint8Array(16), labels });
    await trainer.dispose();
    return { results, loss: after.loss };
  });
  expect(result.results[0]).toMatch(/^true 'tokens' is int64\[batch, 8\], got 17 elements/);
  expect(result.results[1]).toMatch(/^true step_model.onnx on wasm: /);
  expect(result.results[2]).toMatch(/^true manifest.json: cannot be read: .*HTTP 404/);
  expect(result.loss).toBeGreaterThan(0);
  await page.close();
});

test("trains artifacts from a file input", async () => {
  const f = await fixture("mlp-wasm");
  const { page } = await openPage(browser, isolated.address);
  await page.setContent('<input type="file" multiple id="files">');
  const names = ["manifest.json", "checkpoint", "step_model.onnx", "inference_model.onnx"];
  await page.setInputFiles("#files", names.map((name) => ({
    name, mimeType: "application/octet-stream", buffer: Buffer.from(bytes(`${f.folder}/${name}`)),
  })));
  const loss = await page.evaluate(async () => {
    const { Trainer } = onnxtrain;
    const { files } = document.querySelector<HTMLInputElement>("#files")!;
    const trainer = await Trainer.create({ artifacts: files!, device: "wasm", runtimeUrl: new URL("/ort/ort.wasm.bundle.min.mjs", location.href).href });
    const { loss } = await trainer.step({ x: new Float32Array(20).fill(0.5), labels: [1, 2] });
    await trainer.dispose();
    return loss;
  });
  expect(loss).toBeGreaterThan(0);
  await page.close();
});
