/** Messages of ONNX, as far as the models of heads need them. */
import { concat } from "./sha256.js";

/** Numbers of element types in ONNX. */
export const ELEMENT: Readonly<Record<string, number>> = {
  float32: 1, uint8: 2, int8: 3, uint16: 4, int16: 5, int32: 6, int64: 7, bool: 9, float16: 10,
  float64: 11, uint32: 12, uint64: 13, bfloat16: 16,
};

/** Gives a whole number in groups of seven bits. */
export function varint(value: number): Uint8Array {
  const bytes: number[] = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) + 128);
  return Uint8Array.from([...bytes, value]);
}

/** Gives a field with a length: bytes, text or a message. */
export const field = (number: number, content: Uint8Array): Uint8Array =>
  concat([varint(8 * number + 2), varint(content.length), content]);

/** Gives a field that holds a whole number. */
export const whole = (number: number, value: number): Uint8Array => concat([varint(8 * number), varint(value)]);

/** Gives a field that holds a string. */
export const text = (number: number, value: string): Uint8Array => field(number, new TextEncoder().encode(value));

/** Gives the description of an input or output: name, element type and sizes, some of them symbols. */
export function valueInfo(value: { name: string; dtype: string; shape: readonly (number | string)[] }): Uint8Array {
  const dims = value.shape.map((n) => field(1, typeof n === "number" ? whole(1, n) : text(2, n)));
  const tensor = concat([whole(1, ELEMENT[value.dtype]!), field(2, concat(dims))]);
  return concat([text(1, value.name), field(2, field(1, tensor))]);
}

/** Gives a tensor; its bytes come last. */
export const tensor = (name: string, dtype: string, dims: readonly number[], data: Uint8Array): Uint8Array =>
  concat([...dims.map((n) => whole(1, n)), whole(2, ELEMENT[dtype]!), text(8, name), field(9, data)]);

/** An attribute of a node: a whole number, a float, or a graph. */
export type Attribute = number | { readonly float: number } | { readonly graph: Uint8Array };

/** Gives an attribute. */
function attribute(name: string, value: Attribute): Uint8Array {
  if (typeof value === "number") return concat([text(1, name), whole(3, value), whole(20, 2)]);
  if ("graph" in value) return concat([text(1, name), field(6, value.graph), whole(20, 5)]);
  const bits = new Uint8Array(Float32Array.of(value.float).buffer);
  return concat([text(1, name), varint(8 * 2 + 5), bits, whole(20, 1)]);
}

/** Gives a node. */
export function node(
  type: string, inputs: readonly string[], outputs: readonly string[], attributes: Readonly<Record<string, Attribute>> = {},
): Uint8Array {
  return concat([
    ...inputs.map((n) => text(1, n)), ...outputs.map((n) => text(2, n)), text(3, outputs[0]!), text(4, type),
    ...Object.entries(attributes).map(([name, value]) => field(5, attribute(name, value))),
  ]);
}

/** Gives a model around a graph, which comes last. */
export const model = (graph: Uint8Array, opset: number, irVersion: number): Uint8Array =>
  concat([whole(1, irVersion), text(2, "onnxtrain"), field(8, concat([text(1, ""), whole(2, opset)])), field(7, graph)]);
