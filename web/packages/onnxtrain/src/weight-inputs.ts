/** Weights of a model file as inputs, so that one session runs with whatever weights there are. */
import { ArtifactError } from "./errors.js";
import type { WeightSpec } from "./manifest.js";
import { ELEMENT, field, valueInfo } from "./protobuf.js";
import { concat } from "./sha256.js";

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
    return field(GRAPH, concat([...kept, ...weights.map((w) => field(INPUT, info(w)))]));
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

function info(w: WeightSpec): Uint8Array {
  if (ELEMENT[w.dtype] === undefined) throw new ArtifactError(`'${w.name}': element type ${w.dtype} is not supported here`);
  return valueInfo(w);
}
