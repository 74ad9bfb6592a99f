/** The code listings of the page: inference, and the training of the network. */
export const program = (longer: number): string => `import * as ort from "onnxruntime-web/wasm";

const net = await ort.InferenceSession.create("./style.onnx");

async function stylize(source) { // an <img>, <video> or ImageBitmap
  const scale = ${longer} / Math.max(source.width, source.height);
  const [width, height] = [source.width, source.height].map((n) => 4 * Math.round((n * scale) / 4));
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.drawImage(source, 0, 0, width, height);
  const image = context.getImageData(0, 0, width, height);
  const count = width * height;
  const planes = Float32Array.from({ length: 3 * count }, (_, i) => image.data[4 * (i % count) + Math.floor(i / count)]);
  const { styled } = await net.run({ image: new ort.Tensor("float32", planes, [1, 3, height, width]) });
  for (let i = 0; i < 3 * count; i++) image.data[4 * (i % count) + Math.floor(i / count)] = styled.data[i];
  context.putImageData(image, 0, 0);
  return canvas;
}
`;

export const training = `# The modules are in examples/style_transfer; any image can be the style:
#   python train.py --style-image FILE --out DIR
import onnxtrain
from onnxtrain.torch import from_torch

model = from_torch(StyleLoss(net, content_weight=1, style_weight=1), batch)  # the model returns its loss
artifacts = onnxtrain.build(model, loss="loss", optimizer="adam:lr=0.004", train="net.*")
trainer = onnxtrain.Trainer(artifacts)
trainer.fit(batches, epochs=12, schedule="cosine")
`;
