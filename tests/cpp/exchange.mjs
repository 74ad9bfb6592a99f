// Goes on from a checkpoint in Node: node exchange.mjs <artifacts> <batches> <checkpoint> <steps> <out>
import { readFileSync, writeFileSync } from "node:fs";
import { readCheckpoint, Trainer } from "../../web/packages/onnxtrain/dist/index.js";

const [artifacts, batches, checkpoint, steps, out] = process.argv.slice(2);
const { tensors } = await readCheckpoint(new Uint8Array(readFileSync(batches)));
const trainer = await Trainer.create({ artifacts, device: "node", threads: 1 });
await trainer.importCheckpoint(new Uint8Array(readFileSync(checkpoint)));
for (let i = 0; i < Number(steps); i++) {
  const mine = [...tensors].filter(([name]) => name.startsWith(`${i}/`));
  await trainer.step(Object.fromEntries(mine.map(([name, t]) => [name.slice(name.indexOf("/") + 1), t])));
}
writeFileSync(out, await trainer.exportCheckpoint());
await trainer.dispose();
