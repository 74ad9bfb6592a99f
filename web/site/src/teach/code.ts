/** The code listings of the page: training, and inference with the exported model. */
const list = (names: readonly string[]) => JSON.stringify(names);

export const training = (names: readonly string[], inputs: number, epochs: number): string => `import { createHead, Trainer } from "onnxtrain";
import * as ort from "onnxruntime-web/wasm";

const names = ${list(names)};
const backbone = await ort.InferenceSession.create("./backbone.onnx"); // frozen: image [1, 3, 64, 64] -> x [1, ${inputs}]
const features = async (planes) => (await backbone.run({ image: new ort.Tensor("float32", planes, [1, 3, 64, 64]) })).x.data;

// examples: [{ planes: Float32Array(3 * 64 * 64) of 0 to 1, label: 0 .. ${Math.max(names.length - 1, 1)} }, ...]
const x = [], labels = [];
for (const { planes, label } of examples) {
  x.push([...(await features(planes))]);
  labels.push(label);
}

const artifacts = await createHead({ inputs: ${inputs}, classes: names.length, optimizer: { lr: 0.003, weightDecay: 0.05 } });
const trainer = await Trainer.create({ artifacts }); // in a worker
for await (const { epoch, loss } of trainer.fit({ x, labels }, { epochs: ${epochs}, batchSize: 16 })) console.log(epoch, loss);

const { logits } = await trainer.predict({ x: [[...(await features(planes))]] });
console.log(names[logits.data.indexOf(Math.max(...logits.data))]);
`;

export const inference = (names: readonly string[]): string => `"""Classify an image: pip install onnxruntime pillow; python classify.py image.jpg"""
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

names = ${list(names)}
photo = ImageOps.fit(Image.open(sys.argv[1]).convert("RGB"), (64, 64))
image = np.asarray(photo, np.float32).transpose(2, 0, 1)[None] / 255
(logits,) = onnxruntime.InferenceSession("classifier.onnx").run(None, {"image": image})
probabilities = np.exp(logits[0] - logits[0].max())
for name, probability in zip(names, probabilities / probabilities.sum()):
    print(f"{name}: {probability:.0%}")
`;
