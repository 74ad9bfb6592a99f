/** One system in a process of its own, which is asked by messages: first to open, then to train. */
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { task } from "../systems/task.js";
import { dispatched, openGpu } from "./dawn.mjs";

const runtimes = {
  ours: () => undefined,
  jax: () => undefined,
  tfjs: async () => {
    // Its WebGPU asks whether this is a page.
    globalThis.window = globalThis;
    globalThis.tf = (await import("@tensorflow/tfjs")).default;
    await import("@tensorflow/tfjs-backend-webgpu");
  },
};

let system;
let wanted;
async function open({ work, model, file, ...settings }) {
  const named = await openGpu();
  await runtimes[file]();
  const base = `${join(work, model)}/`;
  const bytes = (name) => new Uint8Array(readFileSync(base + name)).buffer;
  const given = await task(model, base, bytes);
  const runtimeUrl = import.meta.resolve("onnxruntime-web/webgpu");
  system = await (await import(`../systems/${file}.js`)).prepare(given, { ...settings, model, runtimeUrl });
  wanted = given.losses[system.losses];
  return named;
}

async function train(steps) {
  const [before, busy, began] = [dispatched(), process.cpuUsage(), performance.now()];
  const losses = await system.train(steps);
  const ms = (performance.now() - began) / steps;
  const { user, system: kernel } = process.cpuUsage(busy);
  return { losses: Array.from(losses), ms, cpu: (user + kernel) / 1000 / steps, dispatches: (dispatched() - before) / steps, wanted };
}

process.on("message", (m) => {
  Promise.resolve(m.open ? open(m.open) : train(m.steps)).then(
    (answer) => process.send(answer),
    (error) => process.send({ failed: String(error?.message ?? error).split("\n")[0] || "an error without a text" }),
  );
});
process.on("disconnect", () => process.exit(0));
