import type { Server } from "node:http";
import type { Browser } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { FIXTURES, runPython } from "../support.js";
import { openPage, serve, start } from "./page.js";

let browser: Browser;
let site: { server: Server; address: string };
beforeAll(async () => {
  [browser, site] = await Promise.all([start({ webgpu: true }), serve(true)]);
});
afterAll(async () => {
  await browser?.close();
  site?.server.close();
});

interface Leaving {
  readonly node: string;
  readonly moved: readonly string[];
}

test.each(["mlp", "cnn", "transformer"])("the placement report for %s matches the runtime", async (model) => {
  const output = JSON.parse(runPython(
    `
import dataclasses, json, sys, onnx
from onnxtrain.lowering.placement import nodes_off_gpu
model = onnx.load(sys.argv[1], load_external_data=False)
print(json.dumps([dataclasses.asdict(x) for x in nodes_off_gpu(model)]))
`,
    `${FIXTURES}/${model}-webgpu/step_model.onnx`,
  )) as Leaving[];
  expect(output.filter((n) => n.moved.length)).toEqual([]);
  const page = await (await browser.newContext()).newPage();
  const lines: string[] = [];
  page.on("console", (message) => lines.push(message.text()));
  await page.goto(site.address);
  // As a string, because the test runner would rewrite the import.
  await page.evaluate(`(async () => {
    const ort = await import("/ort/ort.webgpu.bundle.min.mjs");
    ort.env.logLevel = "verbose";
    const weights = await fetch("/fixtures/${model}-webgpu/weights.bin");
    const externalData = weights.ok ? [{ path: "weights.bin", data: new Uint8Array(await weights.arrayBuffer()) }] : [];
    const options = { executionProviders: ["webgpu"], logSeverityLevel: 0, externalData };
    await (await ort.InferenceSession.create("/fixtures/${model}-webgpu/step_model.onnx", options)).release();
  })()`);
  const log = lines.join("\n").split("\n");
  const first = log.findIndex((line) => line.includes("Node placements"));
  expect(first).toBeGreaterThan(-1);
  const onCpu: string[] = [];
  let cpu = false;
  for (const line of log.slice(first + 1)) {
    if (/placed on \[/.test(line)) cpu = line.includes("CPUExecutionProvider");
    const node = / {2,}(\w+) \(([^()]+)\)\s*$/.exec(line);
    if (cpu && node) onCpu.push(`${node[1]} ${node[2]}`);
  }
  // Shape computations always run on the CPU; the runtime itself adds a Gather.
  const known = new Set(output.map((n) => n.node));
  const unexpected = onCpu.filter((n) => !/^(Shape|Size) /.test(n) && n !== "Gather Gather" && !known.has(n.split(" ")[1]!));
  expect(unexpected).toEqual([]);
  await page.close();
});

test("parameters and state stay on the GPU from step to step", async () => {
  const { page } = await openPage(browser, site.address);
  const result = await page.evaluate(async () => {
    const { Trainer } = onnxtrain;
    const counted = { bytes: 0 };
    // Reads from the GPU map a buffer.
    const { prototype } = (globalThis as unknown as { GPUBuffer: { prototype: { mapAsync(...a: unknown[]): unknown; size: number } } }).GPUBuffer;
    const { mapAsync } = prototype;
    prototype.mapAsync = function (this: { size: number }, mode: unknown, ...rest: unknown[]) {
      if (mode === 1) counted.bytes += this.size;
      return mapAsync.call(this, mode, ...rest);
    };
    const trainer = await Trainer.create({ artifacts: "/fixtures/mlp-web", device: "webgpu", worker: false });
    const batch = { x: new Float32Array(80).fill(0.3), labels: new Uint8Array(8) };
    await trainer.step(batch);
    const perStep: number[] = [];
    for (let i = 0; i < 3; i++) {
      counted.bytes = 0;
      await trainer.step(batch);
      perStep.push(counted.bytes);
    }
    counted.bytes = 0;
    await trainer.exportCheckpoint();
    const whole = counted.bytes;
    const { device } = trainer;
    await trainer.dispose();
    prototype.mapAsync = mapAsync;
    return { device, perStep, whole };
  });
  expect(result.device).toBe("webgpu");
  // Only loss, accuracy and logits are read; a checkpoint has about 9 kB.
  for (const bytes of result.perStep) expect(bytes).toBeLessThan(1024);
  expect(result.whole).toBeGreaterThan(8000);
  await page.close();
});
