import { readFileSync, statSync } from "node:fs";
import type { Server } from "node:http";
import type { Browser } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { distance, FIXTURES, ROOT } from "../support.js";
import { openPage, serve, start } from "./page.js";

declare global {
  var onnxtrainText: typeof import("../../src/text/index.js");
}

const FOLDER = `${FIXTURES}/lm`;
const expected = JSON.parse(readFileSync(`${FOLDER}/expected.json`, "utf8")) as { losses: number[]; before: number[]; prompt: number[]; seed: number };
const WEIGHTS = statSync(`${FOLDER}/weights.bin`).size;

let browser: Browser;
let isolated: { server: Server; address: string };
beforeAll(async () => {
  [browser, isolated] = await Promise.all([start(), serve(true)]);
});
afterAll(async () => {
  await browser?.close();
  isolated?.server.close();
});

interface RunOptions {
  threads: number;
  worker: boolean;
}

/** Generates, trains on all batches in a page and saves half way. */
async function run(page: Awaited<ReturnType<typeof openPage>>["page"], options: RunOptions) {
  await page.addScriptTag({ type: "module", content: 'import * as text from "/onnxtrain/text/index.js"; globalThis.onnxtrainText = text;' });
  await page.waitForFunction(() => "onnxtrain" in globalThis && "onnxtrainText" in globalThis);
  return await page.evaluate(async ([options, expected]) => {
    const { Trainer, readCheckpoint } = onnxtrain;
    const { generate, exportPeft, exportOnnxAdapter } = onnxtrainText;
    const base = new URL("/fixtures/lm/", location.href);
    const { tensors } = await readCheckpoint(new Uint8Array(await (await fetch(new URL("batches.safetensors", base))).arrayBuffer()));
    const progress: { loaded: number; total: number | undefined; cached: boolean }[] = [];
    const create = () => Trainer.create({
      artifacts: base, device: "wasm", seed: expected.seed, ...options, onProgress: ({ loaded, total, cached }) => progress.push({ loaded, total, cached }),
    });
    const batch = (i: number) => Object.fromEntries(["input_ids", "attention_mask", "labels"].map((n) => [n, tensors.get(`${i}/${n}`)!]));
    const trainer = await create();
    const written: number[] = [];
    for await (const token of generate(trainer, expected.prompt, { maxTokens: 8, keep: false })) written.push(token);
    const losses: number[] = [];
    for (let i = 0; i < expected.losses.length; i++) {
      if (i === 6) await trainer.save("half");
      losses.push((await trainer.step(batch(i))).loss);
    }
    const peft = await exportPeft(trainer, { baseModel: "ours" });
    const adapter = await exportOnnxAdapter(trainer);
    await trainer.dispose();
    const again = await create();
    await again.load("half");
    const rest: number[] = [];
    for (let i = 6; i < expected.losses.length; i++) rest.push((await again.step(batch(i))).loss);
    await again.dispose();
    return { written, losses, rest, progress, peft: peft["adapter_model.safetensors"].length, adapter: adapter.length };
  }, [options, expected] as const);
}

describe.each([{ threads: 1, worker: true }, { threads: 2, worker: true }, { threads: 1, worker: false }])("%o", (options) => {
  test("fine-tunes like Python, generates, saves and resumes", async () => {
    const { page, pageErrors } = await openPage(browser, isolated.address);
    const fetched: string[] = [];
    page.on("request", (r) => fetched.push(new URL(r.url()).pathname.split("/").pop()!));
    const result = await run(page, options);
    expect(result.written).toEqual(expected.before);
    expect(result.losses.length).toBe(12);
    expect(distance(result.losses, expected.losses)).toBeLessThan(1e-3);
    expect(result.rest).toEqual(result.losses.slice(6));
    expect(result.peft).toBe(statSync(`${FOLDER}/peft/adapter_model.safetensors`).size);
    expect(result.adapter).toBeGreaterThan(result.peft / 2);
    // Downloaded once for two trainers and for generation, with progress reports.
    expect(fetched.filter((f) => f === "weights.bin")).toEqual(["weights.bin"]);
    const first = result.progress.filter((p) => !p.cached);
    expect(first.at(-1)!.loaded).toBe(WEIGHTS);
    expect(result.progress.at(-1)).toEqual({ loaded: WEIGHTS, total: WEIGHTS, cached: true });
    expect(pageErrors).toEqual([]);
    // Still cached after a reload, until forgetWeights() is called.
    await page.reload();
    const later = await run(page, options);
    expect(later.losses).toEqual(result.losses);
    expect(fetched.filter((f) => f === "weights.bin").length).toBe(1);
    expect(await page.evaluate(() => onnxtrain.forgetWeights())).toBe(1);
    await page.close();
  });
});

test("the example in docs/web.md runs", async () => {
  const page = readFileSync(`${ROOT}/docs/web.md`, "utf8").split("## Fine-tune a language model in a tab")[1]!;
  const block = /```js\n([^`]*(?:`[^`]+`[^`]*)*?)```/.exec(page)![1]!;
  expect(block).toContain("exportOnnxAdapter(trainer)");
  const { page: tab, pageErrors } = await openPage(browser, isolated.address);
  // A character-level stand-in for the tokenizer class in the example.
  const tokenizer = `class Tokenizer {
    constructor(file, config) { if (!file.model || !config.kind) throw new Error("the tokenizer's files"); }
    encode(text) { return { ids: [...text].map((c) => c.charCodeAt(0)) }; }
    decode(ids) { return ids.map((i) => String.fromCharCode(32 + (i % 90))).join(""); }
  }`;
  await tab.route("**/tokenizer.json", (r) => r.fulfill({ json: { model: {} } }));
  await tab.route("**/tokenizer_config.json", (r) => r.fulfill({ json: { kind: "letters" } }));
  const own = block.replace(/import { Tokenizer } .*/, tokenizer).replaceAll("./art/", "/fixtures/lm/");
  const shown = 'const texts = ["call me", "some years ago"]; globalThis.shown = []; const show = (x) => globalThis.shown.push(x);';
  await tab.addScriptTag({ type: "module", content: `${shown}\n${own}\nglobalThis.done = { peft, adapter, step: trainer.globalStep };` });
  await tab.waitForFunction(() => "done" in globalThis);
  const result = await tab.evaluate(() => {
    const { done, shown } = globalThis as unknown as { done: { peft: object; adapter: Uint8Array; step: number }; shown: string[] };
    return { files: Object.keys(done.peft), adapter: done.adapter.length, step: done.step, shown };
  });
  expect(result.files).toEqual(["adapter_config.json", "adapter_model.safetensors"]);
  expect(result.step).toBe(2);
  expect(result.shown.filter((s) => s.startsWith("loss ")).length).toBe(2);
  expect(result.shown.join("").length).toBeGreaterThan(60);
  expect(pageErrors).toEqual([]);
  await tab.close();
});

test("a damaged file is rejected and not cached", async () => {
  const { page } = await openPage(browser, isolated.address);
  await page.route("**/weights.bin", (route) => route.fulfill({ body: Buffer.alloc(WEIGHTS), contentType: "application/octet-stream" }));
  const output = await page.evaluate(async () => {
    const artifacts = new URL("/fixtures/lm/", location.href);
    const failed = await onnxtrain.Trainer.create({ artifacts, device: "wasm" }).then(() => "nothing", (e: Error) => `${e.name}: ${e.message}`);
    return [failed, String(await onnxtrain.forgetWeights())];
  });
  expect(output[0]).toMatch(/^ArtifactError: weights.bin: sha256 does not match the manifest/);
  expect(output[1]).toBe("0");
  await page.close();
});

test("without free space the file is downloaded but not cached", async () => {
  const { page, pageErrors } = await openPage(browser, isolated.address);
  const output = await page.evaluate(async () => {
    const own = FileSystemWritableFileStream.prototype.write;
    FileSystemWritableFileStream.prototype.write = async () => { throw new DOMException("full", "QuotaExceededError"); };
    const source = new URL("/fixtures/lm/", location.href);
    const full = await onnxtrain.Artifacts.load(source).then((a) => a.data("weights.bin"));
    FileSystemWritableFileStream.prototype.write = own;
    const loaded: number[] = [];
    const options = await onnxtrain.Artifacts.load(source, { cache: false, onProgress: (p) => loaded.push(p.loaded) });
    const unkept = await options.data("weights.bin");
    return [(full as Blob).size, (unkept as Blob).size, loaded.at(-1), await onnxtrain.forgetWeights()];
  });
  expect(output).toEqual([WEIGHTS, WEIGHTS, WEIGHTS, 0]);
  expect(pageErrors).toEqual([]);
  await page.close();
});
