import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import type { Server } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium, type BrowserContext, type Page } from "playwright-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { Trainer } from "../../src/index.js";
import { bytes, fixture, runPython } from "../support.js";
import { browserPath, openPage, TIMEOUT, serve, start } from "./page.js";

let site: { server: Server; address: string };
const folder = mkdtempSync(join(tmpdir(), "onnxtrain-"));
beforeAll(async () => {
  site = await serve(true);
});
afterAll(() => {
  site?.server.close();
  rmSync(folder, { recursive: true, force: true });
});

const PYTHON = `
import json, sys
from onnxtrain.checkpoint import from_bytes
from onnxtrain import Trainer
folder, source, out, start, stop = sys.argv[1:]
trainer = Trainer(folder, seed=5, threads=1)
if source: trainer.load(source)
batches, _ = from_bytes(open(folder + "/batches.safetensors", "rb").read())
first, label = trainer.inputs
losses = [trainer.step(batches[f"{i}/{first}"], batches[f"{i}/{label}"]).loss for i in range(int(start), int(stop))]
trainer.save(out)
print(json.dumps(losses))
`;

/** Resumes from a checkpoint in a page, trains on some batches of a fixture and returns the new checkpoint. */
async function inPage(page: Page, name: string, checkpoint: Uint8Array, from: number, to: number): Promise<{ data: number[]; losses: number[] }> {
  return await page.evaluate(async ([name, checkpoint, from, to]) => {
    const { readCheckpoint, Trainer } = onnxtrain;
    const get = async (file: string) => new Uint8Array(await (await fetch(`/fixtures/${name}/${file}`)).arrayBuffer());
    const { tensors } = await readCheckpoint(await get("batches.safetensors"));
    const trainer = await Trainer.create({ artifacts: `/fixtures/${name}`, device: "wasm" });
    await trainer.importCheckpoint(Uint8Array.from(checkpoint));
    const losses: number[] = [];
    for (let i = from; i < to; i++) {
      losses.push((await trainer.step(Object.fromEntries(trainer.inputs.map((n) => [n, tensors.get(`${i}/${n}`)!])))).loss);
    }
    const data = [...(await trainer.exportCheckpoint())];
    await trainer.dispose();
    return { data, losses };
  }, [name, [...checkpoint], from, to] as const);
}

test.each(["cnn", "transformer"])("a run of the %s continues from Python to a page, Node and Python: bit-identical checkpoints, one loss curve", async (model) => {
  const f = await fixture(`${model}-wasm`);
  const path = (name: string) => join(folder, `${model}-${name}.safetensors`);
  const losses = JSON.parse(runPython(PYTHON, f.folder, "", path("python"), "0", "5")) as number[];
  const browser = await start();
  const { page } = await openPage(browser, site.address);
  const begun = bytes(path("python"));
  // Without a step, nothing changes: parameters, buffers, state, progress.
  expect(Buffer.compare(Uint8Array.from((await inPage(page, `${model}-wasm`, begun, 0, 0)).data), begun)).toBe(0);
  const result = await inPage(page, `${model}-wasm`, begun, 5, 10);
  losses.push(...result.losses);
  await browser.close();
  const trainer = await Trainer.create({ artifacts: f.folder, device: "node", threads: 1 });
  await trainer.importCheckpoint(Uint8Array.from(result.data));
  expect(Buffer.compare(await trainer.exportCheckpoint(), Uint8Array.from(result.data))).toBe(0);
  for (const batch of f.batches.slice(10, 15)) losses.push((await trainer.step(batch)).loss);
  await trainer.save(path("node"));
  await trainer.dispose();
  const same = runPython("import sys; from onnxtrain import Trainer; t = Trainer(sys.argv[1]); t.load(sys.argv[2]); t.save(sys.argv[3]); print(t.global_step)", f.folder, path("node"), path("again"));
  expect(Number(same)).toBe(15);
  expect(Buffer.compare(bytes(path("again")), bytes(path("node")))).toBe(0);
  losses.push(...(JSON.parse(runPython(PYTHON, f.folder, path("node"), path("end"), "15", "20")) as number[]));
  expect(Math.max(...losses.map((l, i) => Math.abs(l - f.expected.losses[i]!)))).toBeLessThan(1e-4);
});

/** Returns the id of the browser's main process, found by the profile directory in its command line. */
function processOf(profile: string): number {
  for (const id of readdirSync("/proc").filter((n) => /^\d+$/.test(n))) {
    let command: string;
    try {
      command = readFileSync(`/proc/${id}/cmdline`, "utf8");
    } catch {
      continue; // it ended meanwhile
    }
    if (command.includes(`--user-data-dir=${profile}`) && !command.includes("--type=")) return Number(id);
  }
  throw new Error("the browser is not running");
}

const openProfile = (profile: string): Promise<BrowserContext> =>
  chromium.launchPersistentContext(profile, { executablePath: browserPath(), args: ["--no-sandbox"], timeout: TIMEOUT });

describe.each(["private files", "IndexedDB"])("a browser that is killed while saving to %s", (kind) => {
  test("keeps the last complete checkpoint", async () => {
    const profile = mkdtempSync(join(folder, "profile-"));
    const first = await openProfile(profile);
    const page = await first.newPage();
    let finished = 0;
    await page.exposeFunction("finished", (n: number) => void (finished = n));
    await page.goto(site.address);
    // Saves of 12 MB one after the other, each with its number as content.
    await page.evaluate((kind) => {
      const { databaseStore, privateFileStore, writeCheckpoint } = onnxtrain;
      const store = kind === "IndexedDB" ? databaseStore() : privateFileStore();
      const run = async () => {
        for (let n = 1; ; n++) {
          const data = new Float32Array(3_000_000).fill(n);
          await store.write("run", await writeCheckpoint(new Map([["w", { dtype: "float32", dims: [data.length], data }]]), new Map([["step", String(n)]])));
          await (globalThis as unknown as { finished(n: number): Promise<void> }).finished(n);
        }
      };
      void run();
    }, kind);
    await expect.poll(() => finished, { interval: 20 }).toBeGreaterThan(1);
    // In the middle of the next save.
    await new Promise((resolve) => setTimeout(resolve, 40));
    process.kill(processOf(profile), "SIGKILL");
    await first.close().catch(() => undefined);
    const second = await openProfile(profile);
    const { page: later } = await openPage(second, site.address);
    const result = await later.evaluate(async (kind) => {
      const { databaseStore, privateFileStore, readCheckpoint } = onnxtrain;
      const { tensors, meta } = await readCheckpoint(await (kind === "IndexedDB" ? databaseStore() : privateFileStore()).read("run"));
      const { data } = tensors.get("w")!;
      return { step: Number(meta.get("step")), equal: (data as Float32Array).every((v) => v === data[0]), value: Number(data[0]) };
    }, kind);
    await second.close();
    expect(result.equal).toBe(true);
    expect(result.value).toBe(result.step);
    expect([finished, finished + 1]).toContain(result.step);
  });
});
