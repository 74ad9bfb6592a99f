// A first training run with the installed npm package, in an empty folder that has `art`.
import { Trainer } from "onnxtrain";

const trainer = await Trainer.create({ artifacts: "./art/", device: "node" });
const rows = 64;
const image = new Float32Array(rows * 64);
const labels = new Array(rows);
for (let row = 0; row < rows; row++) {
  labels[row] = row % 10;
  for (let k = 0; k < 6; k++) image[row * 64 + labels[row] * 6 + k] = 1;
}
const losses = [];
for await (const m of trainer.fit({ image, labels }, { epochs: 40, batchSize: 32 })) losses.push(m.loss);
const model = await trainer.exportModel();
await trainer.dispose();
if (!(losses.at(-1) < 0.5 * losses[0])) throw new Error(`it does not learn: ${losses[0]} to ${losses.at(-1)}`);
if (model.byteLength < 1000) throw new Error("the exported model is too small");
console.log(`node ${process.version}: loss ${losses[0].toFixed(3)} to ${losses.at(-1).toFixed(3)}`);
