import { ArtifactError } from "./errors.js";
import type { WeightSpec } from "./manifest.js";
import { concat } from "./sha256.js";

/** The part of ONNX's protobuf format that this package reads and writes. */

/** TensorProto.DataType by numpy name. */
export const ELEMENT: Readonly<Record<string, number>> = {
  float32: 1, uint8: 2, int8: 3, uint16: 4, int16: 5, int32: 6, int64: 7, bool: 9, float16: 10,
  float64: 11, uint32: 12, uint64: 13, bfloat16: 16,
};

/** Encodes an integer >= 0 as a varint. */
export function varint(value: number): Uint8Array {
  const bytes: number[] = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) + 128);
  return Uint8Array.from([...bytes, value]);
}

/** Encodes a length-delimited field: bytes, a string or a message. */
export const field = (number: number, content: Uint8Array): Uint8Array =>
  concat([varint(8 * number + 2), varint(content.length), content]);

/** Encodes an integer field. */
export const whole = (number: number, value: number): Uint8Array => concat([varint(8 * number), varint(value)]);

/** Encodes a string field. */
export const text = (number: number, value: string): Uint8Array => field(number, new TextEncoder().encode(value));

/** Encodes a ValueInfoProto: name, dtype and shape of an input or output. */
export function valueInfo(value: { name: string; dtype: string; shape: readonly (number | string)[] }): Uint8Array {
  const dims = value.shape.map((n) => field(1, typeof n === "number" ? whole(1, n) : text(2, n)));
  const tensor = concat([whole(1, ELEMENT[value.dtype]!), field(2, concat(dims))]);
  return concat([text(1, value.name), field(2, field(1, tensor))]);
}

/** Encodes a TensorProto; its data is the last field. */
export const tensor = (name: string, dtype: string, dims: readonly number[], data: Uint8Array): Uint8Array =>
  concat([...dims.map((n) => whole(1, n)), whole(2, ELEMENT[dtype]!), text(8, name), field(9, data)]);

/** Value of a node attribute: an integer, a float, or a graph. */
export type Attribute = number | { readonly float: number } | { readonly graph: Uint8Array };

/** Encodes an AttributeProto. */
function attribute(name: string, value: Attribute): Uint8Array {
  if (typeof value === "number") return concat([text(1, name), whole(3, value), whole(20, 2)]);
  if ("graph" in value) return concat([text(1, name), field(6, value.graph), whole(20, 5)]);
  const bits = new Uint8Array(Float32Array.of(value.float).buffer);
  return concat([text(1, name), varint(8 * 2 + 5), bits, whole(20, 1)]);
}

/** Encodes a NodeProto. */
export function node(
  type: string, inputs: readonly string[], outputs: readonly string[], attributes: Readonly<Record<string, Attribute>> = {},
): Uint8Array {
  return concat([
    ...inputs.map((n) => text(1, n)), ...outputs.map((n) => text(2, n)), text(3, outputs[0]!), text(4, type),
    ...Object.entries(attributes).map(([name, value]) => field(5, attribute(name, value))),
  ]);
}

/** Encodes a ModelProto; the graph is the last field. */
export const model = (graph: Uint8Array, opset: number, irVersion: number): Uint8Array =>
  concat([whole(1, irVersion), text(2, "onnxtrain"), field(8, concat([text(1, ""), whole(2, opset)])), field(7, graph)]);

/** Field numbers of ModelProto, GraphProto and TensorProto. */
const GRAPH = 7;
const INITIALIZER = 5;
const INPUT = 11;
const TENSOR_NAME = 8;

/** Turns the given initializers of a model into inputs, so that one session runs with any weights. */
export function weightsAsInputs(model: Uint8Array, weights: readonly WeightSpec[]): Uint8Array {
  const named = new Set(weights.map((w) => w.name));
  const isWeight = (tensor: Uint8Array) =>
    [...fields(tensor)].some((f) => f.number === TENSOR_NAME && named.has(new TextDecoder().decode(f.content)));
  const parts = [...fields(model)].map((part) => {
    if (part.number !== GRAPH) return part.whole;
    const remaining = [...fields(part.content)].filter((f) => f.number !== INITIALIZER || !isWeight(f.content)).map((f) => f.whole);
    return field(GRAPH, concat([...remaining, ...weights.map((w) => field(INPUT, info(w)))]));
  });
  return concat(parts);
}

interface Field {
  readonly number: number;
  /** Payload of a length-delimited field; empty for numbers. */
  readonly content: Uint8Array;
  /** The value of an integer; 0 for other fields. Exact below 2^53. */
  readonly value: number;
  /** The bytes of the field, including its key. */
  readonly whole: Uint8Array;
}

/** Iterates over the fields of a protobuf message. */
export function* fields(data: Uint8Array): Generator<Field> {
  let at = 0;
  const next = (): number => {
    for (let value = 0, scale = 1; ; scale *= 128) {
      const byte = data[at++];
      if (byte === undefined) throw new ArtifactError("the model is damaged: truncated protobuf field");
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  while (at < data.length) {
    const start = at;
    const key = next();
    const kind = key % 8;
    let from = at;
    let value = 0;
    if (kind === 2) {
      const size = next();
      from = at;
      at += size;
    } else if (kind === 0) value = next();
    else if (kind === 1 || kind === 5) at += kind === 1 ? 8 : 4;
    else throw new ArtifactError("not an ONNX model: no protobuf field");
    if (at > data.length) throw new ArtifactError("the model is damaged: truncated protobuf field");
    const content = kind === 2 ? data.subarray(from, at) : data.subarray(0, 0);
    yield { number: Math.floor(key / 8), content, value, whole: data.subarray(start, at) };
  }
}

function info(w: WeightSpec): Uint8Array {
  if (ELEMENT[w.dtype] === undefined) throw new ArtifactError(`'${w.name}': dtype ${w.dtype} is not supported`);
  return valueInfo(w);
}
