/**
 * Times one training step of every system: one Chromium, a page per system, rounds in random order.
 *
 *   node run.mjs WORK OUT.json [ROUNDS] [MODEL ...] [--resume] [--any-load]
 *
 * Every system first trains on batches whose losses are known; one that computes something else
 * is reported as wrong and not timed. Times of a round are compared with our time of the same round.
 * OUT.json is written after each round; `--resume` continues a stopped run. A run waits for a busy
 * machine and then refuses it, unless `--any-load` is given.
 */
import { existsSync, readFileSync } from "node:fs";
import { cpus, loadavg } from "node:os";
import { parseArgs } from "node:util";
import { open, serve, start, train } from "./browser.mjs";
import { measure } from "./measure.mjs";
import { quiet } from "./quiet.mjs";
import { save, said } from "./results.mjs";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { resume: { type: "boolean" }, "any-load": { type: "boolean" } },
});
const [work, out, rounds = "5", ...chosen] = positionals;
if (!out || !(Number(rounds) > 0)) throw new Error("usage: node run.mjs WORK OUT.json [ROUNDS] [MODEL ...] [--resume] [--any-load]");
const MODELS = ["mlp", "cnn", "transformer"];
/** Batches per call of ours: what `onnxtrain build --target web` chooses for these models. */
const TOGETHER = 8;
const GROUPS = [["wasm", "adamw"], ["wasm", "sgd"], ["webgpu", "adamw"]];

const systems = (model, device) => device === "webgpu"
  ? [
      { name: "onnxtrain", file: "ours", device, together: 1 },
      { name: "TensorFlow.js webgpu", file: "tfjs", device },
      { name: "jax-js webgpu", file: "jax", device },
    ]
  : [
      { name: "onnxtrain", file: "ours", device, together: TOGETHER },
      { name: "onnxtrain, 1 per call", file: "ours", device, together: 1 },
      { name: "onnxruntime-web/training 1.19.2", file: "official", device },
      { name: "TensorFlow.js wasm", file: "tfjs", device },
      // Convolutions on WebGL in software take minutes per round.
      ...(model === "cnn" ? [] : [{ name: "TensorFlow.js webgl", file: "tfjs", device: "webgl" }]),
      { name: "jax-js wasm", file: "jax", device },
    ];

const results = values.resume && existsSync(out)
  ? JSON.parse(readFileSync(out, "utf8"))
  : { started: new Date().toISOString(), load: loadavg()[0], seconds: 0, groups: [] };
const server = await serve(work);
const browser = await start();
Object.assign(results, { wanted: Number(rounds), browser: browser.version(), node: process.version, cpu: cpus()[0].model, cores: cpus().length });
const place = { systems, open: (system, settings) => open(browser, server.address, system, settings), train, alive: () => browser.isConnected() };
const before = results.seconds;
const began = performance.now();
const keep = () => save(out, { ...results, seconds: before + (performance.now() - began) / 1000, loadAfter: loadavg()[0] });
let late = false;
for (const model of chosen.length ? chosen : MODELS) {
  for (const [device, optimizer] of GROUPS) {
    let group = results.groups.find((g) => g.model === model && g.device === device && g.optimizer === optimizer);
    if (group && group.done >= Number(rounds)) continue;
    if (!values["any-load"] && !(await quiet())) {
      late = true;
      break;
    }
    if (!group) results.groups.push((group = { model, optimizer, device, done: 0, rows: [] }));
    console.log(`${model}, ${optimizer}, ${device}`);
    await measure({ place, group, rounds: Number(rounds), keep });
    for (const line of said(group)) console.log(`  ${line}`);
  }
  if (late) break;
}
keep();
await browser.close();
server.close();
if (late) {
  console.error("other processes load the machine: nothing more was timed\nhint: continue later with --resume, or pass --any-load");
  process.exitCode = 3;
}
