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

/**
 * Returns the weights from pixels as images, and their side length: of an MLP those from pixels to logits, both layers
 * multiplied without the activation; of a CNN its filters.
 */
export async function weightImages(trainer: Trainer): Promise<{ tiles: Float32Array[]; side: number } | undefined> {
  const names = new Set(trainer.parameters.map((p) => p.name));
  const first = ["layers.0.weight", "conv1.weight"].find((n) => names.has(n));
  if (!first) return undefined;
  const { data, dims }: HostTensor = await trainer.getParameter(first);
  const width = data.length / dims[0]!;
  const rows = Array.from({ length: dims[0]! }, (_, i) => (data as Float32Array).slice(i * width, (i + 1) * width));
  const side = Math.sqrt(width);
  if (!names.has("layers.1.weight")) return { tiles: rows, side };
  const { data: last, dims: [classes] } = await trainer.getParameter("layers.1.weight");
  const tiles = Array.from({ length: classes! }, (_, k) => {
    const sum = new Float32Array(width);
    rows.forEach((row, j) => row.forEach((w, i) => (sum[i]! += (last[k * rows.length + j] as number) * w)));
    return sum;
  });
  return { tiles, side };
}

/** Returns the logits of images. */
export async function predict(trainer: Trainer, image: Float32Array): Promise<Float32Array> {
  const { logits } = await trainer.predict({ [trainer.inputs[0]!]: image });
  return logits!.data as Float32Array;
}
