import type { Server } from "node:http";
import { readFileSync } from "node:fs";
import type { Browser } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import type { Trainer } from "../../src/index.js";
import { openPage, serve, start } from "./page.js";

let browser: Browser;
let site: { server: Server; address: string };
beforeAll(async () => {
  [browser, site] = await Promise.all([start(), serve(true)]);
});
afterAll(async () => {
  await browser?.close();
  site?.server.close();
});

test("running out of memory throws OutOfMemoryError, with and without a worker, and loses nothing", async () => {
  const { page } = await openPage(browser, site.address);
  const actual = await page.evaluate(async () => {
    const { Trainer, OutOfMemoryError, RuntimeError, TooLargeError } = onnxtrain;
    const refusals: string[] = [];
    const batch = (width: number) => ({ x: { data: new Float32Array(width).fill(0.01), dims: [1, width] }, labels: [1] });
    const results: { errors: string[]; same: boolean; step: number }[] = [];
    for (const worker of [true, false]) {
      const planned = await Trainer.create({ artifacts: "/fixtures/outer-product-wasm", device: "wasm", worker });
      refusals.push(await planned.step(batch(32_767)).then(() => "", (e: Error) => `${e instanceof TooLargeError} ${e.message}`));
      await planned.dispose();
      // Without the check, the runtime itself runs out of memory.
      const trainer = await Trainer.create({ artifacts: "/fixtures/outer-product-wasm", device: "wasm", worker, memoryLimit: Infinity });
      await trainer.step(batch(10));
      await trainer.save("memory");
      const before = await trainer.exportCheckpoint();
      const errors: string[] = [];
      // Tensors of just below 4 GiB, the limit of wasm, and of more.
      for (const width of [32_767, 100_000]) {
        const error = await trainer.step(batch(width)).then(() => undefined, (e: Error) => e);
        errors.push(`${error instanceof OutOfMemoryError && error instanceof RuntimeError} ${error?.message}`);
      }
      const after = await trainer.exportCheckpoint();
      const same = before.length === after.length && before.every((b, i) => b === after[i]);
      await trainer.step(batch(20));
      await trainer.load("memory");
      results.push({ errors, same, step: trainer.globalStep });
      await trainer.dispose();
    }
    return { results, refusals };
  });
  for (const r of actual.refusals) expect(r).toMatch(/^true training needs about \d+ MB with .*, the limit is \d+ MB/);
  for (const { errors, same, step } of actual.results) {
    for (const e of errors) expect(e).toMatch(/^true step_model[\w.]*\.onnx on wasm: out of memory: .*\nhint: use smaller batches/s);
    expect(same).toBe(true);
    expect(step).toBe(1);
  }
});

test("errors name what is wrong with artifacts and batches", async () => {
  const { page } = await openPage(browser, site.address);
  const messages = await page.evaluate(async () => {
    const { Trainer } = onnxtrain;
    const files = new Map<string, Uint8Array>();
    for (const name of ["manifest.json", "checkpoint", "step_model.onnx", "inference_model.onnx"]) {
      files.set(name, new Uint8Array(await (await fetch(`/fixtures/mlp-wasm/${name}`)).arrayBuffer()));
    }
    const manifest = new TextDecoder().decode(files.get("manifest.json"));
    const put = (name: string, text: string) => new Map(files).set(name, new TextEncoder().encode(text));
    const without = (name: string) => new Map([...files].filter(([n]) => n !== name));
    const damaged = new Map(files).set("step_model.onnx", files.get("step_model.onnx")!.map((b, i) => (i === 500 ? b ^ 1 : b)));
    const make = async (artifacts: Map<string, Uint8Array>) =>
      await Trainer.create({ artifacts, device: "wasm" }).then(() => "nothing", (e: Error) => `${e.name}: ${e.message}`);
    const trainer = await Trainer.create({ artifacts: files, device: "wasm" });
    const step = async (batch: object) => await trainer.step(batch as never).then(() => "nothing", (e: Error) => `${e.name}: ${e.message}`);
    const x = new Float32Array(20);
    const actual = {
      version: await make(put("manifest.json", manifest.replace('"format": 1', '"format": 9'))),
      text: await make(put("manifest.json", "<!doctype html>")),
      lost: await make(without("step_model.onnx")),
      damaged: await make(damaged),
      shape: await step({ x: { data: x, dims: [4, 5] }, labels: [1, 2, 3, 0] }),
      rows: await step({ x, labels: [1, 2, 3] }),
      type: await step({ x, labels: [0.5, 1] }),
      missing: await step({ x }),
    };
    await trainer.dispose();
    return actual;
  });
  expect(messages.version).toMatch(/^ManifestError: manifest.json: format 9, but this version reads format 1/);
  expect(messages.text).toMatch(/^ManifestError: manifest.json: not JSON/);
  expect(messages.lost).toMatch(/^ArtifactError: step_model.onnx: cannot be read: found manifest.json, /);
  expect(messages.damaged).toMatch(/^ArtifactError: step_model.onnx: sha256 does not match the manifest/);
  expect(messages.shape).toMatch(/^ShapeError: 'x' is float32\[batch, 10\], got shape \[4, 5\]/);
  expect(messages.rows).toMatch(/^ShapeError: 'x' is float32\[batch, 10\], got 20 elements, but batch is 3 in 'labels'/);
  expect(messages.type).toMatch(/^ShapeError: 'labels' is int64, got numbers with values that do not fit: 0.5/);
  expect(messages.missing).toMatch(/^ShapeError: missing from the batch: labels/);
});

test("training continues in a hidden tab and after a tab was frozen", async () => {
  const { page } = await openPage(browser, site.address);
  const steps = await page.evaluate(async () => {
    // Simulate the throttling of hidden tabs: no animation frames, one timer per second.
    Object.defineProperty(document, "visibilityState", { value: "hidden" });
    document.dispatchEvent(new Event("visibilitychange"));
    globalThis.requestAnimationFrame = () => 0;
    const timer = globalThis.setTimeout;
    globalThis.setTimeout = ((work: () => void, ms = 0) => timer(work, Math.max(1000, ms))) as never;
    const { Trainer } = onnxtrain;
    const trainer = await Trainer.create({ artifacts: "/fixtures/mlp-wasm", device: "wasm" });
    const data = { x: Float32Array.from({ length: 6400 }, (_, i) => Math.sin(i)), labels: new Uint8Array(640).map((_, i) => i % 4) };
    let steps = 0;
    for await (const _ of trainer.fit(data, { batchSize: 8 })) steps++;
    Object.assign(globalThis, { trainer, data });
    return steps;
  });
  expect(steps).toBe(80);
  const cdp = await page.context().newCDPSession(page);
  await page.evaluate(() => {
    const { trainer, data } = globalThis as unknown as { trainer: Trainer; data: never };
    const run = async () => {
      let steps = 0;
      for await (const _ of trainer.fit(data, { batchSize: 8, epochs: 10 })) steps++;
      document.title = `steps ${steps}`;
    };
    void run();
  });
  await cdp.send("Page.setWebLifecycleState", { state: "frozen" });
  await new Promise((resolve) => setTimeout(resolve, 500));
  await cdp.send("Page.setWebLifecycleState", { state: "active" });
  await page.waitForFunction(() => document.title === "steps 800", undefined, { polling: 200 });
});

test("200 rounds of create and dispose do not leak memory or workers", async () => {
  const { page } = await openPage(browser, site.address);
  const rounds = async (count: number, worker: boolean): Promise<void> => {
    await page.evaluate(async ([count, worker]) => {
      const { Trainer } = onnxtrain;
      const files = new Map<string, Uint8Array>();
      for (const name of ["manifest.json", "checkpoint", "step_model.onnx", "inference_model.onnx"]) {
        files.set(name, new Uint8Array(await (await fetch(`/fixtures/mlp-wasm/${name}`)).arrayBuffer()));
      }
      for (let i = 0; i < count; i++) {
        const trainer = await Trainer.create({ artifacts: files, device: "wasm", worker, threads: 1 });
        await trainer.step({ x: new Float32Array(20).fill(0.5), labels: [1, 2] });
        await trainer.predict({ x: new Float32Array(20) });
        await trainer.dispose();
      }
    }, [count, worker] as const);
  };
  const cdp = await page.context().newCDPSession(page);
  const devtools = await browser.newBrowserCDPSession();
  /** JavaScript heap of the tab and resident memory of all renderer processes, in MiB. */
  const memory = async () => {
    await cdp.send("HeapProfiler.collectGarbage");
    const { usedSize } = await cdp.send("Runtime.getHeapUsage");
    const { processInfo } = await devtools.send("SystemInfo.getProcessInfo");
    const pages = processInfo.filter((p) => p.type === "renderer");
    const resident = pages.reduce((n, p) => n + Number(readFileSync(`/proc/${p.id}/statm`, "utf8").split(" ")[1]) * 4096, 0);
    return { scripts: usedSize / 2 ** 20, resident: resident / 2 ** 20 };
  };
  await rounds(20, false);
  const before = await memory();
  await rounds(200, false);
  const after = await memory();
  console.log(`200 rounds: scripts ${(after.scripts - before.scripts).toFixed(1)} MiB, resident ${(after.resident - before.resident).toFixed(0)} MiB`);
  expect(after.scripts - before.scripts).toBeLessThan(5);
  expect(after.resident - before.resident).toBeLessThan(80);
  await rounds(3, true);
  await expect.poll(() => page.workers().length).toBe(0);
});

test("the page stays responsive while the worker trains", async () => {
  const { page } = await openPage(browser, site.address);
  /** Number of other tasks that the page ran while training on one large batch. */
  const tasks = (worker: boolean) =>
    page.evaluate(async (worker) => {
      const trainer = await onnxtrain.Trainer.create({ artifacts: "/fixtures/cnn-wasm", device: "wasm", worker, threads: 1 });
      const n = 4096;
      const batch = { x: Float32Array.from({ length: 64 * n }, (_, i) => Math.sin(i)), labels: new Uint8Array(n).map((_, i) => i % 4) };
      let tasks = 0;
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = () => void (tasks++, port2.postMessage(0));
      port2.postMessage(0);
      await trainer.step(batch);
      port1.close();
      await trainer.dispose();
      return tasks;
    }, worker);
  const [live, dead] = [await tasks(true), await tasks(false)];
  console.log(`tasks during one step: ${live}, and ${dead} without a worker`);
  expect(live).toBeGreaterThan(20 + dead);
});

test("a save without space fails and keeps the last one", async () => {
  const { page } = await openPage(browser, site.address);
  const save = (from: number, count: number) =>
    page.evaluate(async ([from, count]) => {
      const store = onnxtrain.privateFileStore();
      // Noise, which browsers cannot compress.
      const data = new Uint8Array(count);
      for (let at = 0; at < count; at += 65536) crypto.getRandomValues(data.subarray(at, at + 65536));
      data[0] = from;
      const outcome = await store.write("run", data).then(() => "saved", (e: Error) => `${e.name}: ${e.message}`);
      const kept = await store.read("run");
      return { outcome, first: kept[0]!, length: kept.length };
    }, [from, count] as const);
  expect(await save(1, 1_000_000)).toEqual({ outcome: "saved", first: 1, length: 1_000_000 });
  const cdp = await page.context().newCDPSession(page);
  await cdp.send("Storage.overrideQuotaForOrigin", { origin: new URL(site.address).origin, quotaSize: 4_000_000 });
  const actual = await save(2, 30_000_000);
  expect(actual.outcome).toMatch(/^CheckpointError: 'run': cannot be written: .*\nhint: check the free space; earlier checkpoints are intact/s);
  expect({ first: actual.first, length: actual.length }).toEqual({ first: 1, length: 1_000_000 });
  await page.close();
});

test("a signal aborts creation and terminates its worker", async () => {
  const { page } = await openPage(browser, site.address);
  const actual = await page.evaluate(async () => {
    const stop = new AbortController();
    // Abort right after the worker is started, before it is ready.
    globalThis.Worker = class extends Worker {
      constructor(address: string | URL, options?: WorkerOptions) {
        super(address, options);
        queueMicrotask(() => stop.abort());
      }
    };
    const making = onnxtrain.Trainer.create({ artifacts: "/fixtures/cnn-wasm", device: "wasm", signal: stop.signal });
    return await making.then(() => "made", (e: Error) => e.name);
  });
  expect(actual).toBe("AbortError");
  await expect.poll(() => page.workers().length).toBe(0);
  await page.close();
});
