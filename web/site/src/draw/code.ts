/** The code listings of the page: training, and inference with the exported model. */
import { hiddenOf } from "./net.js";

export interface RunSettings {
  readonly model: string;
  readonly data: string;
  readonly size: number;
  readonly classes: number;
  readonly lr: string;
  readonly schedule: string;
  readonly batch: string;
  readonly epochs: string;
}

export function training({ model, data, size, classes, lr, schedule, batch, epochs }: RunSettings): string {
  const [input, top, tests] = [model === "mlp" ? "x" : "image", data === "mnist" ? 255 : 16, data === "mnist" ? 2000 : 360];
  const artifacts = model === "mlp"
    ? `await createHead({ inputs: ${size * size}, classes: ${classes}, hidden: [${hiddenOf(size)}], activation: "relu" })`
    : `"./art/${model}-${data}/"; // onnxtrain build model.onnx --loss cross_entropy --metric accuracy --target web -o art/`;
  return `import { ${model === "mlp" ? `createHead, ${schedule}` : schedule}, Trainer } from "onnxtrain";

// ${size} x ${size} pixels and a label per digit; the last ${tests} digits are for testing.
const bytes = async (file) => new Uint8Array(await (await fetch(file)).arrayBuffer());
const pixels = Float32Array.from(await bytes("${data}.bin"), (v) => v / ${top});
const labels = await bytes("${data}-labels.bin");
const rows = (from, to) => ({
  ${input}: pixels.subarray(from * ${size * size}, to * ${size * size}),
  labels: labels.subarray(from, to),
});
const split = labels.length - ${tests};

const artifacts = ${artifacts}${model === "mlp" ? ";" : ""}
const trainer = await Trainer.create({ artifacts, device: "wasm" });

const options = { epochs: ${epochs}, batchSize: ${batch}, schedule: ${schedule}(${lr}), validation: rows(split, labels.length) };
for await (const { step, loss, validation } of trainer.fit(rows(0, split), options)) {
  if (validation) console.log(step, loss, validation.accuracy);
}
const model = await trainer.exportModel(); // an ONNX file for any runtime
`;
}

export function inference({ model, size }: RunSettings, names: readonly string[]): string {
  const shape = model === "mlp" ? `-1, ${size * size}` : `-1, 1, ${size}, ${size}`;
  return `# pip install onnxruntime numpy
import numpy as np
import onnxruntime

names = ${JSON.stringify(names)}
session = onnxruntime.InferenceSession("model.onnx")
image = np.zeros((${size}, ${size}), np.float32)  # gray values from 0 to 1
image[1:${size - 1}, ${size / 2}] = 1
[logits] = session.run(None, {session.get_inputs()[0].name: image.reshape(${shape})})
print(names[int(logits.argmax())])
`;
}
