/** The digit classifiers: an MLP built here with `createHead`, or artifacts built in Python. */
import { createHead, type HostTensor, Trainer } from "onnxtrain";
import { say, siteFile } from "../shell/dom.js";

export interface Choice {
  readonly model: string;
  readonly data: string;
  readonly size: number;
  readonly device: "wasm" | "webgpu";
  readonly classes: number;
}

/** Size of the hidden layer, by image size. */
export const hiddenOf = (size: number): number => (size < 16 ? 64 : 128);

/** Creates a trainer with initial weights. */
export async function openNet({ model, data, size, device, classes }: Choice): Promise<Trainer> {
  const artifacts = model === "mlp"
    ? await createHead({ inputs: size * size, classes, hidden: [hiddenOf(size)], activation: "relu" })
    : siteFile(`art/${model}-${data}/`);
  return await Trainer.create({ artifacts, device, onMessage: say });
}

/** Creates a trainer with more classes and copies the weights of another trainer. */
export async function growNet(old: Trainer, choice: Choice): Promise<Trainer> {
  const next = await openNet(choice);
  for (const { name } of next.parameters) {
    const [own, other] = [await next.getParameter(name), await old.getParameter(name)];
    // Classes are rows; the new ones come last and keep their initial weights.
    (own.data as Float32Array).set(other.data as Float32Array);
    await next.setParameter(name, own);
  }
  return next;
}

/** Returns the weights of the first layer as images, if it is connected to pixels, and their side length. */
export async function firstLayer(trainer: Trainer): Promise<{ tiles: Float32Array[]; side: number } | undefined> {
  const weights = trainer.parameters.find((p) => p.name === "layers.0.weight" || p.name === "conv1.weight");
  if (!weights) return undefined;
  const { data, dims }: HostTensor = await trainer.getParameter(weights.name);
  const width = data.length / dims[0]!;
  return {
    tiles: Array.from({ length: dims[0]! }, (_, i) => (data as Float32Array).slice(i * width, (i + 1) * width)),
    side: Math.sqrt(width),
  };
}

/** Returns the logits of images. */
export async function predict(trainer: Trainer, image: Float32Array): Promise<Float32Array> {
  const { logits } = await trainer.predict({ [trainer.inputs[0]!]: image });
  return logits!.data as Float32Array;
}
