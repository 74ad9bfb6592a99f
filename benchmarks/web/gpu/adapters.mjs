/**
 * Trains adapters of a small language model on a GPU from Node: tokens per second, and losses beside those of the CPU.
 *
 *   node gpu/adapters.mjs WORK OUT.json [SECONDS] [ROWS]
 *
 * WORK is what adapters.py wrote; OUT.json of run.mjs gets one entry more, `adapters`.
 */
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { dispatched, openGpu } from "./dawn.mjs";

const [work, out, seconds = "5", most = "8"] = process.argv.slice(2);
const { adapter, software } = await openGpu();
const { Trainer } = await import("onnxtrain");
const { tokenBatch } = await import("onnxtrain/text");
const { shape, ...given } = JSON.parse(readFileSync(join(work, "adapters.json"), "utf8"));
const [rows, wanted] = [given.rows.slice(0, Number(most)), given.losses.slice(0, Number(most))];
const tokens = rows[0][0].length;

const began = performance.now();
const trainer = await Trainer.create({
  artifacts: `${resolve(work)}/artifacts/`, device: "webgpu", worker: false, threads: 1,
  runtimeUrl: import.meta.resolve("onnxruntime-web/webgpu"), sizes: { batch_size: 1, sequence_length: tokens },
});
const ready = (performance.now() - began) / 1000;
const losses = [];
const times = [];
const step = async (ids) => {
  const start = performance.now();
  const { loss } = await trainer.step(tokenBatch([ids], trainer.inputs));
  times.push(performance.now() - start);
  return loss;
};
console.log(`ready after ${ready.toFixed(1)} s`);
for (const [ids] of rows) {
  losses.push(await step(ids));
  if (losses.length === 1) console.log(`first step ${(times[0] / 1000).toFixed(1)} s`);
}
const before = dispatched();
const [until, busy] = [performance.now() + 1000 * Number(seconds), process.cpuUsage()];
const checked = times.length;
do await step(rows[times.length % rows.length][0]); while (performance.now() < until);
const { user, system } = process.cpuUsage(busy);
const timed = times.slice(checked).sort((a, b) => a - b);
const ms = timed[timed.length >> 1];
const found = {
  adapter, software, shape, tokens, ready, ms, tokensPerSecond: (1000 * tokens) / ms, steps: timed.length, cpu: (user + system) / 1000 / timed.length,
  dispatches: (dispatched() - before) / timed.length, device: trainer.device, off: Math.max(...wanted.map((loss, i) => Math.abs(loss - losses[i]))), losses, wanted,
};
const results = existsSync(out) ? JSON.parse(readFileSync(out, "utf8")) : {};
writeFileSync(out, `${JSON.stringify({ ...results, adapters: found }, null, 1)}\n`);
console.log(`adapters: ${ms.toFixed(1)} ms per step, ${found.tokensPerSecond.toFixed(0)} tokens/s, ${found.dispatches} dispatches, losses off by ${found.off.toExponential(1)}`);
process.exit(0);
