/**
 * Times one training step of every system: one Chromium, a page per system, rounds in random order.
 *
 *   node run.mjs WORK OUT.json [SECONDS] [MODEL ...]
 *
 * Every system first trains on up to 16 batches whose losses are known; one that computes something else
 * is reported as wrong and not timed. Times of a round are compared with our time of the same round.
 */
import { writeFileSync } from "node:fs";
import { cpus, loadavg } from "node:os";
import { open, serve, start, train } from "./browser.mjs";

const [work, out, seconds = "15", ...chosen] = process.argv.slice(2);
const MODELS = ["mlp", "cnn", "transformer"];
/** Batches per call of ours: what `onnxtrain build --target web` chooses for these models. */
const TOGETHER = { mlp: 8, cnn: 8, transformer: 8 };
const ROUNDS = 24;
const TOLERANCE = 2e-3;

const systems = (model, device) => device === "webgpu"
  ? [
      { name: "onnxtrain", file: "ours", device, together: 1 },
      { name: "TensorFlow.js webgpu", file: "tfjs", device },
      { name: "jax-js webgpu", file: "jax", device },
    ]
  : [
      { name: "onnxtrain", file: "ours", device, together: TOGETHER[model] },
      { name: `onnxtrain, ${9 - TOGETHER[model]} per call`, file: "ours", device, together: 9 - TOGETHER[model] },
      { name: "onnxruntime-web/training 1.19.2", file: "official", device },
      { name: "TensorFlow.js wasm", file: "tfjs", device },
      // Convolutions on WebGL in software take minutes per round.
      ...(model === "cnn" ? [] : [{ name: "TensorFlow.js webgl", file: "tfjs", device: "webgl" }]),
      { name: "jax-js wasm", file: "jax", device },
    ];

const median = (list) => {
  const sorted = list.toSorted((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
};
const quantile = (list, q) => list.toSorted((a, b) => a - b)[Math.floor(q * (list.length - 1))];

async function group(browser, address, model, optimizer, device) {
  const limit = 1000 * Number(seconds);
  const found = [];
  for (const system of systems(model, device)) {
    const entry = { name: system.name, rounds: [] };
    found.push(entry);
    try {
      const began = performance.now();
      entry.page = await open(browser, address, system, { model, optimizer });
      const slow = model === "cnn" && ["tfjs", "jax"].includes(system.file);
      const count = device === "webgpu" ? (model === "cnn" ? 2 : 4) : slow ? 4 : 16;
      const first = await train(entry.page, count);
      entry.opened = performance.now() - began;
      entry.off = Math.max(...first.losses.map((loss, i) => Math.abs(loss - first.wanted[i])));
      if (!(entry.off < TOLERANCE)) throw new Error(`wrong: a loss is off by ${entry.off.toExponential(1)}`);
      // Until the engine has compiled the hot code for good, and to learn how long a step takes.
      const whole = system.together ?? 1;
      const until = performance.now() + (device === "webgpu" ? 0 : 1000);
      let warm;
      do warm = await train(entry.page, whole);
      while (performance.now() < until);
      entry.steps = whole * Math.max(1, Math.round(150 / warm.ms / whole));
      entry.dispatches = warm.dispatches;
    } catch (error) {
      entry.failed = error.message.split("\n")[0].replace("page.evaluate: ", "").slice(0, 200);
      await entry.page?.close();
      console.log(`  ${system.name}: ${entry.failed}`);
    }
  }
  const running = found.filter((e) => !e.failed);
  const until = performance.now() + limit;
  for (let round = 0; round < ROUNDS && (round < 3 || performance.now() < until); round++) {
    const order = running.map((e) => [Math.random(), e]).sort((a, b) => a[0] - b[0]);
    for (const [, entry] of order) {
      const { ms, cpu } = await train(entry.page, entry.steps);
      entry.rounds.push({ ms, cpu });
    }
  }
  const [ours] = found;
  const rows = found.map(({ name, rounds, steps, off, dispatches, failed, opened }) => {
    if (failed) return { name, failed };
    const ratios = (key) => rounds.map((r, i) => r[key] / ours.rounds[i][key]);
    const times = rounds.map((r) => r.ms);
    return {
      name, steps, off, rounds: rounds.length, opened: Math.round(opened), ms: median(times), best: Math.min(...times),
      cpu: median(rounds.map((r) => r.cpu)), dispatches,
      ...(ours.failed ? {} : { ratio: median(ratios("ms")), low: quantile(ratios("ms"), 0.25), high: quantile(ratios("ms"), 0.75), cpuRatio: median(ratios("cpu")), bestRatio: Math.min(...times) / Math.min(...ours.rounds.map((r) => r.ms)) }),
    };
  });
  for (const entry of running) await entry.page.close();
  return { model, optimizer, device, rows };
}

const server = await serve(work);
const browser = await start();
const results = { started: new Date().toISOString(), browser: browser.version(), node: process.version, cpu: cpus()[0].model, cores: cpus().length, load: loadavg()[0], groups: [] };
for (const model of chosen.length ? chosen : MODELS) {
  for (const [device, optimizer] of [["wasm", "adamw"], ["wasm", "sgd"], ["webgpu", "adamw"]]) {
    console.log(`${model}, ${optimizer}, ${device}`);
    const found = await group(browser, server.address, model, optimizer, device);
    for (const r of found.rows) {
      if (!r.failed) console.log(`  ${r.name.padEnd(34)} ${r.ms.toFixed(2)} ms, their time / ours ${r.ratio?.toFixed(2)} (best against best ${r.bestRatio?.toFixed(2)}, by processor time ${r.cpuRatio?.toFixed(2)}), ${r.rounds} rounds`);
    }
    results.groups.push(found);
    writeFileSync(out, `${JSON.stringify({ ...results, loadAfter: loadavg()[0] }, null, 1)}\n`);
  }
}
await browser.close();
server.close();
