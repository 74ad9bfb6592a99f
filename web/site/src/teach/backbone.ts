import { Runner } from "../runner/runner.js";
import { siteFile } from "../shell/dom.js";

export const SIZE = 64;

/** Crops the central square of an image and scales it to 64 x 64. */
export function crop(source: CanvasImageSource, width: number, height: number): ImageData {
  const side = Math.min(width, height);
  // Scale down by halves, so that all pixels of a large image contribute.
  let current: CanvasImageSource = source;
  let [x, y, size] = [(width - side) / 2, (height - side) / 2, side];
  for (;;) {
    const next = Math.max(SIZE, Math.ceil(size / 2));
    const canvas = new OffscreenCanvas(next, next);
    const context = canvas.getContext("2d", { willReadFrequently: next === SIZE })!;
    context.imageSmoothingQuality = "high";
    context.drawImage(current, x, y, size, size, 0, 0, next, next);
    if (next === SIZE) return context.getImageData(0, 0, SIZE, SIZE);
    [current, x, y, size] = [canvas, 0, 0, next];
  }
}

/** Converts an image to a tensor [3, 64, 64] with values from 0 to 1. */
export function planes({ data }: ImageData): Float32Array<ArrayBuffer> {
  const out = new Float32Array(3 * SIZE * SIZE);
  for (let i = 0; i < SIZE * SIZE; i++) for (let c = 0; c < 3; c++) out[c * SIZE * SIZE + i] = data[4 * i + c]! / 255;
  return out;
}

export class Backbone {
  readonly #runner: Runner;
  /** The bytes of the model, for the exported file. */
  readonly model: Uint8Array;

  private constructor(runner: Runner, model: Uint8Array) {
    this.#runner = runner;
    this.model = model;
  }

  static async open(): Promise<Backbone> {
    const response = await fetch(siteFile("models/backbone.onnx"));
    if (!response.ok) throw new Error(`the model cannot be loaded: HTTP ${response.status}`);
    const model = new Uint8Array(await response.arrayBuffer());
    return new Backbone(await Runner.of(model.slice()), model);
  }

  /** Returns the features of an image. */
  async features(image: ImageData): Promise<Float32Array> {
    const { x } = await this.#runner.run({ image: { data: planes(image), dims: [1, 3, SIZE, SIZE] } });
    return x!.data;
  }
}

// Composition of two ONNX models without a library: a protobuf message is a sequence of numbered fields, which are copied
// or dropped without parsing their contents.

/** Field numbers of ModelProto and GraphProto. */
const MODEL = { graph: 7, opset: 8 };
const GRAPH = { node: 1, name: 2, initializer: 5, input: 11, output: 12 };

interface Field {
  readonly number: number;
  /** The whole field with its key, and the payload of a length-delimited field. */
  readonly bytes: Uint8Array;
  readonly content: Uint8Array;
}

function varint(bytes: Uint8Array, at: number): [value: number, next: number] {
  let [value, factor] = [0, 1];
  for (;;) {
    const byte = bytes[at++];
    if (byte === undefined) throw new Error("the model is truncated");
    value += (byte & 127) * factor;
    if (byte < 128) return [value, at];
    factor *= 128;
  }
}

/** Parses the fields of a message. */
function fields(bytes: Uint8Array): Field[] {
  const all: Field[] = [];
  for (let at = 0; at < bytes.length;) {
    const start = at;
    const [key, afterKey] = varint(bytes, at);
    let end: number;
    let from = afterKey;
    if (key % 8 === 2) {
      const [length, next] = varint(bytes, afterKey);
      [from, end] = [next, next + length];
    } else if (key % 8 === 0) end = varint(bytes, afterKey)[1];
    else if (key % 8 === 5) end = afterKey + 4;
    else if (key % 8 === 1) end = afterKey + 8;
    else throw new Error(`unknown wire type in the model: ${key % 8}`);
    all.push({ number: Math.floor(key / 8), bytes: bytes.subarray(start, end), content: bytes.subarray(from, end) });
    at = end;
  }
  return all;
}

function concatenate(parts: readonly Uint8Array[]): Uint8Array {
  const out = new Uint8Array(parts.reduce((n, p) => n + p.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}

function lengthDelimited(number: number, content: Uint8Array): Uint8Array {
  const head: number[] = [8 * number + 2];
  let rest = content.length;
  for (; rest > 127; rest = Math.floor(rest / 128)) head.push((rest % 128) + 128);
  return concatenate([Uint8Array.from([...head, rest]), content]);
}

const graphOf = (model: readonly Field[]): Field[] => fields(model.find((f) => f.number === MODEL.graph)!.content);

/** Composes two models: the outputs of the first are the inputs of the second, with the same names. */
export function composeModels(first: Uint8Array, second: Uint8Array): Uint8Array {
  const [a, b] = [fields(first), fields(second)];
  const added = new Set([GRAPH.node, GRAPH.initializer, GRAPH.output]);
  const graph = concatenate([
    ...graphOf(a).filter((f) => f.number !== GRAPH.output).map((f) => f.bytes),
    ...graphOf(b).filter((f) => added.has(f.number)).map((f) => f.bytes),
  ]);
  return concatenate([...a.filter((f) => f.number !== MODEL.graph).map((f) => f.bytes), lengthDelimited(MODEL.graph, graph)]);
}
