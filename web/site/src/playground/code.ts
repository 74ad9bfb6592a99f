/** The code listing of the page, with the current settings. */
import { headOptions, type Shape } from "./net.js";
import type { Settings } from "./settings.js";

const value = (v: unknown): string => JSON.stringify(v)!.replace(/"(\w+)":/g, " $1: ").replace(/,/g, ", ").replace(/,\s+/g, ", ").replace(/\}/g, " }");

export function listing(shape: Shape, settings: Settings, points: number): string {
  const options = Object.entries(headOptions(shape)).map(([key, v]) => `  ${key}: ${value(v)},`).join("\n");
  return `import { createHead, Trainer } from "onnxtrain";

// Build the network, its gradients and the optimizer as ONNX graphs, without Python.
const artifacts = await createHead({
${options}
});
const trainer = await Trainer.create({ artifacts, device: "wasm" });
trainer.learningRate = ${settings.rate};

// Two coordinates and a class per point; the page has ${points} points.
const x = Float32Array.from([0.1, 0.4, -0.3, -0.2]);
const labels = Int32Array.from([0, 1]);

for await (const { epoch, loss } of trainer.fit({ x, labels }, { epochs: 100, batchSize: ${settings.batch} })) {
  console.log(epoch, loss);
}

// Predict the class of a point.
const { logits } = await trainer.predict({ x: [0.5, 0.5] });
console.log(logits.data);

// An ONNX file for any runtime.
const model = await trainer.exportModel();
`;
}
