// Trains artifacts in Node; resumes from a checkpoint of Python, if there is one.
//
//   onnxtrain build model.onnx ... -o art/       (in Python)
//   node train.mjs art/ [run.safetensors]
import { existsSync, writeFileSync } from "node:fs";
import { cosine, Trainer } from "onnxtrain";

const [artifacts = "art/", checkpoint = "run.safetensors"] = process.argv.slice(2);
const trainer = await Trainer.create({ artifacts, device: "node" });
if (existsSync(checkpoint)) await trainer.load(checkpoint);
console.log(`${trainer.parameters.length} parameters, at step ${trainer.globalStep}`);

// Synthetic data: the class is the index of the largest of the first few features.
const model = trainer.manifest.models.find((m) => m.role === "eval");
const [input, target] = model.inputs.filter((t) => t.role === "input" || t.role === "target");
const width = input.shape[1];
const classes = 4;
function rows(n) {
  const x = Float32Array.from({ length: n * width }, () => Math.random() * 2 - 1);
  const labels = new Uint8Array(n);
  for (let i = 0; i < n; i++) {
    const row = x.subarray(i * width, i * width + classes);
    labels[i] = row.indexOf(Math.max(...row));
  }
  return { [input.name]: x, [target.name]: labels };
}

const data = rows(2000);
const validation = rows(500);
const schedule = cosine(trainer.learningRate);
for await (const m of trainer.fit(data, { epochs: 5, batchSize: 32, schedule, validation })) {
  if (m.validation) {
    const { loss, accuracy } = m.validation;
    console.log(`epoch ${m.epoch}  step ${m.step}  loss ${loss.toFixed(4)}  accuracy ${accuracy?.toFixed(3)}`);
  }
}

await trainer.save(checkpoint); // resume in Python: Trainer(...).load("run.safetensors")
writeFileSync("model.onnx", await trainer.exportModel()); // runs in any ONNX runtime
await trainer.dispose();
