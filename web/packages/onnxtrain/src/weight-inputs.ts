/** Weights of a model file as inputs, so that one session runs with whatever weights there are. */
import { ArtifactError } from "./errors.js";
import type { WeightSpec } from "./manifest.js";
import { concat } from "./sha256.js";

/** Numbers of element types in ONNX. */
const ELEMENT: Readonly<Record<string, number>> = {
  float32: 1, uint8: 2, int8: 3, uint16: 4, int16: 5, int32: 6, int64: 7, bool: 9, float16: 10,
  float64: 11, uint32: 12, uint64: 13, bfloat16: 16,
};
/** Numbers of fields in ONNX's messages. */
const GRAPH = 7;
const INITIALIZER = 5;
const INPUT = 11;
const TENSOR_NAME = 8;

/** Gives the model with inputs in place of the weights that it holds. */
export function weightsAsInputs(model: Uint8Array, weights: readonly WeightSpec[]): Uint8Array {
  const named = new Set(weights.map((w) => w.name));
  const held = (tensor: Uint8Array) =>
    [...fields(tensor)].some((f) => f.number === TENSOR_NAME && named.has(new TextDecoder().decode(f.content)));
  const parts = [...fields(model)].map((part) => {
    if (part.number !== GRAPH) return part.whole;
    const kept = [...fields(part.content)].filter((f) => f.number !== INITIALIZER || !held(f.content)).map((f) => f.whole);
    return field(GRAPH, concat([...kept, ...weights.map((w) => field(INPUT, valueInfo(w)))]));
  });
  return concat(parts);
}

interface Field {
  readonly number: number;
  /** Of a field with a length; empty for numbers. */
  readonly content: Uint8Array;
  /** With its key. */
  readonly whole: Uint8Array;
}

/** Gives the fields of a message of protobuf, one after the other. */
function* fields(data: Uint8Array): Generator<Field> {
  let at = 0;
  const next = (): number => {
    for (let value = 0, scale = 1; ; scale *= 128) {
      const byte = data[at++];
      if (byte === undefined) throw new ArtifactError("the model is damaged: a field ends too early");
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < data.length) {
    const start = at;
    const key = next();
    const kind = key % 8;
    let from = at;
    if (kind === 2) {
      const size = next();
      from = at;
      at += size;
    } else if (kind === 0) next();
    else at += kind === 1 ? 8 : 4;
    const content = kind === 2 ? data.subarray(from, at) : data.subarray(0, 0);
    yield { number: Math.floor(key / 8), content, whole: data.subarray(start, at) };
  }
}

function valueInfo(w: WeightSpec): Uint8Array {
  const element = ELEMENT[w.dtype];
  if (element === undefined) throw new ArtifactError(`'${w.name}': element type ${w.dtype} is not supported here`);
  const dims = w.shape.map((n) => field(1, concat([varint(8), varint(n)])));
  const tensor = concat([varint(8), varint(element), field(2, concat(dims))]);
  return concat([field(1, new TextEncoder().encode(w.name)), field(2, field(1, tensor))]);
}

const field = (number: number, content: Uint8Array): Uint8Array =>
  concat([varint(8 * number + 2), varint(content.length), content]);

function varint(value: number): Uint8Array {
  const bytes: number[] = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) + 128);
  return Uint8Array.from([...bytes, value]);
}
