// Continues from a checkpoint: node resume.mjs MODULE ARTIFACTS CHECKPOINT BATCH. Prints the losses of five steps.
import { readFileSync } from "node:fs";

const [module, artifacts, checkpoint, batch] = process.argv.slice(2);
const { Trainer } = await import(module);
const trainer = await Trainer.create({ artifacts, device: "node" });
await trainer.load(checkpoint);
const arrays = JSON.parse(readFileSync(batch, "utf8"));
const data = Object.fromEntries(
  Object.entries(arrays).map(([name, { dims, values }]) => [
    name,
    { dims, dtype: name === "labels" ? "int64" : "float32", data: name === "labels" ? BigInt64Array.from(values, BigInt) : Float32Array.from(values) },
  ]),
);
const losses = [];
for (let i = 0; i < 5; i++) losses.push((await trainer.step(data)).loss);
await trainer.dispose();
console.log(JSON.stringify(losses));
