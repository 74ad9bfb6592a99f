/**
 * Times one training step on a GPU from Node, through WebGPU of Dawn: a process per system, no browser.
 *
 *   node gpu/run.mjs WORK OUT.json [ROUNDS] [MODEL ...] [--resume]
 *
 * WORK is what nets.py wrote. Losses are compared first, as in the browser; OUT.json is written after each round.
 * Artifacts of the same net that are spelled otherwise, in a folder `adamw-NAME` beside `adamw`, are timed too.
 */
import { fork } from "node:child_process";
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { cpus } from "node:os";
import { join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { measure } from "../measure.mjs";
import { said, save } from "../results.mjs";

const LIMIT = 1000 * Number(process.env.LIMIT_S ?? 300);
const { values, positionals } = parseArgs({ allowPositionals: true, options: { resume: { type: "boolean" } } });
const [work, out, rounds = "5", ...chosen] = positionals;
if (!out || !(Number(rounds) > 0)) throw new Error("usage: node gpu/run.mjs WORK OUT.json [ROUNDS] [MODEL ...] [--resume]");
const MODELS = ["mlp", "cnn", "transformer"];

/** Background threads compile the runtime's wasm for seconds; what runs until then is several times slower. */
const WARM = 2500;
const spelledOtherwise = (model) => readdirSync(join(work, model)).filter((name) => name.startsWith("adamw-")).sort();

const systems = (model) => [
  { name: "onnxtrain", file: "ours", device: "webgpu", together: 1 },
  ...spelledOtherwise(model).map((artifacts) => ({ name: `onnxtrain, ${artifacts.slice(6)}`, file: "ours", device: "webgpu", together: 1, artifacts })),
  { name: "TensorFlow.js webgpu", file: "tfjs", device: "webgpu" },
  { name: "jax-js webgpu", file: "jax", device: "webgpu" },
];

/** Asks a process and waits for its answer; ends it where none comes. */
function ask(child, question) {
  return new Promise((answer, refuse) => {
    const timer = setTimeout(() => end(new Error(`no answer within ${LIMIT / 1000} s`)), LIMIT);
    const end = (error, value) => {
      clearTimeout(timer);
      child.removeAllListeners("message").removeAllListeners("exit");
      if (error) child.kill("SIGKILL");
      return error ? refuse(error) : answer(value);
    };
    child.once("message", (m) => (m.failed ? end(new Error(m.failed)) : end(undefined, m)));
    child.once("exit", (code, signal) => end(new Error(`its process ended: ${signal ?? code}`)));
    child.send(question);
  });
}

async function open(system, settings) {
  const child = fork(fileURLToPath(new URL("system.mjs", import.meta.url)));
  child.close = () => child.kill("SIGKILL");
  const { adapter, software } = await ask(child, { open: { ...settings, ...system, work: resolve(work) } });
  if (adapter) Object.assign(results, { adapter, software });
  return child;
}

const place = { systems: (model) => systems(model).map((s) => ({ ...s, warm: WARM })), open, atOnce: cpus().length > 8, train: (child, steps) => ask(child, { steps }) };
const { version: dawn } = JSON.parse(readFileSync(createRequire(import.meta.url).resolve("webgpu/package.json"), "utf8"));
const results = values.resume && existsSync(out)
  ? JSON.parse(readFileSync(out, "utf8"))
  : { started: new Date().toISOString(), node: process.version, dawn, cpu: cpus()[0].model, adapter: "an unknown GPU", software: false, groups: [] };
for (const model of chosen.length ? chosen : MODELS) {
  let group = results.groups.find((g) => g.model === model);
  if (group && group.done >= Number(rounds)) continue;
  if (!group) results.groups.push((group = { model, optimizer: "adamw", device: "webgpu", done: 0, rows: [] }));
  console.log(model);
  await measure({ place, group, rounds: Number(rounds), keep: () => save(out, results) });
  for (const line of said(group)) console.log(`  ${line}`);
}
