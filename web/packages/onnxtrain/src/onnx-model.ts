/** Reads what a model declares: inputs, outputs, weights and nodes. Data of weights is skipped. */
import { ArtifactError } from "./errors.js";
import { ELEMENT, fields } from "./protobuf.js";

/** A declared value; sizes are numbers, names, or `"?"`. No shape if the rank is unknown. */
export interface ModelValue {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly (number | string)[] | undefined;
}

/** An initializer, without its data. */
export interface ModelWeight {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly number[];
}

export interface ModelNode {
  readonly type: string;
  /** Empty for standard operators. */
  readonly domain: string;
  readonly name: string;
  readonly inputs: readonly string[];
  readonly outputs: readonly string[];
  /** Integer attributes; negative ones arrive as 2^64 less. */
  readonly integers: ReadonlyMap<string, number>;
  readonly graphs: readonly ModelGraph[];
}

export interface ModelGraph {
  readonly inputs: readonly ModelValue[];
  readonly outputs: readonly ModelValue[];
  /** Inner values with a declared type. */
  readonly values: readonly ModelValue[];
  readonly weights: readonly ModelWeight[];
  readonly nodes: readonly ModelNode[];
}

export interface OnnxModel extends ModelGraph {
  /** Version of the standard operators. */
  readonly opset: number;
  /** The program that wrote the file. */
  readonly producer: string;
}

const DTYPES = new Map(Object.entries(ELEMENT).map(([name, code]) => [code, name]));
type Fields = readonly { readonly content: Uint8Array; readonly value: number }[];

/** Returns the text of the first field, or "". */
const string = ([first]: Fields): string => (first ? new TextDecoder().decode(first.content) : "");

/** Returns the fields of a message by their numbers. */
function message(bytes: Uint8Array): (number: number) => Fields {
  const all = [...fields(bytes)];
  return (number) => all.filter((f) => f.number === number);
}

function value(bytes: Uint8Array): ModelValue {
  const at = message(bytes);
  const [type] = at(2);
  const [tensor] = type ? message(type.content)(1) : [];
  const parts = tensor && message(tensor.content);
  const [shape] = parts?.(2) ?? [];
  return {
    name: string(at(1)),
    dtype: DTYPES.get(parts?.(1)[0]?.value ?? 0) ?? "unknown",
    shape: shape && message(shape.content)(1).map(({ content }) => {
      const dim = message(content);
      return dim(1)[0]?.value ?? (string(dim(2)) || "?");
    }),
  };
}

function weight(bytes: Uint8Array): ModelWeight {
  const at = message(bytes);
  const shape = at(1).flatMap(({ content, value }) => (content.length ? packed(content) : [value]));
  return { name: string(at(8)), dtype: DTYPES.get(at(2)[0]?.value ?? 0) ?? "unknown", shape };
}

/** Decodes packed varints. */
function packed(content: Uint8Array): number[] {
  const numbers: number[] = [];
  for (let at = 0, value = 0, scale = 1; at < content.length; at++) {
    const byte = content[at]!;
    value += (byte & 127) * scale;
    scale *= 128;
    if (byte < 128) {
      numbers.push(value);
      [value, scale] = [0, 1];
    }
  }
  return numbers;
}

function node(bytes: Uint8Array): ModelNode {
  const at = message(bytes);
  const attributes = at(5).map(({ content }) => message(content));
  const name = (attribute: ReturnType<typeof message>) => string(attribute(1));
  return {
    type: string(at(4)),
    domain: string(at(7)),
    name: string(at(3)),
    inputs: at(1).map((f) => string([f])),
    outputs: at(2).map((f) => string([f])),
    integers: new Map(attributes.flatMap((a) => a(3).map((f) => [name(a), f.value] as const))),
    graphs: attributes.flatMap((a) => a(6).map((f) => graph(f.content))),
  };
}

function graph(bytes: Uint8Array): ModelGraph {
  const at = message(bytes);
  const weights = at(5).map((f) => weight(f.content));
  const named = new Set(weights.map((w) => w.name));
  return {
    // Files before IR version 4 list the weights among the inputs.
    inputs: at(11).map((f) => value(f.content)).filter((v) => !named.has(v.name)),
    outputs: at(12).map((f) => value(f.content)),
    values: at(13).map((f) => value(f.content)),
    weights,
    nodes: at(1).map((f) => node(f.content)),
  };
}

/** Reads an `.onnx` file: inputs, outputs, weights and nodes, without the data of the weights. */
export function readModel(file: Uint8Array): OnnxModel {
  const at = message(file);
  const [found] = at(7);
  if (!found) throw new ArtifactError("not an ONNX model: the file has no graph");
  const opsets = at(8).map(({ content }) => message(content)).filter((o) => string(o(1)) === "");
  return {
    ...graph(found.content), opset: opsets[0]?.(2)[0]?.value ?? 1, producer: string(at(2)),
  };
}

/** Operators that return labels as they are: the same as in Python. */
const PASS_THROUGH = ["Cast", "Concat", "Flatten", "Identity", "Pad", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze", "Where"];
const LARGEST = 2 ** 32;
const LOSSES = ["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"];

/** Returns how many classes the labels `name` select from, if a loss in the graph determines it. */
export function classesIn(graph: ModelGraph, name: string): number | undefined {
  const labels = new Set([name]);
  const sizeOf = (value: string, axis: number) => {
    const shape = [...graph.values, ...graph.inputs, ...graph.outputs].find((v) => v.name === value)?.shape;
    const size = shape?.at(axis);
    return typeof size === "number" ? size : undefined;
  };
  for (const n of graph.nodes) {
    const given = n.inputs.flatMap((x, i) => (labels.has(x) ? [i] : []));
    if (!given.length) continue;
    if (PASS_THROUGH.includes(n.type) && given.some((i) => (n.type === "Where" ? i > 0 : i === 0))) n.outputs.forEach((y) => labels.add(y));
    else if (n.type === "Scan") {
      const body = n.graphs[0];
      const inner = given.flatMap((i) => (body ? [classesIn(body, body.inputs[i]!.name)] : []));
      if (inner[0] !== undefined) return inner[0];
    } else if (given.includes(1) && [...LOSSES, "GatherElements"].includes(n.type)) {
      const axis = LOSSES.includes(n.type) ? 1 : (n.integers.get("axis") ?? 0);
      const size = sizeOf(n.inputs[0]!, axis > LARGEST ? -1 : axis); // a negative axis arrives as 2^64 - 1
      if (size !== undefined) return size;
    }
  }
  return undefined;
}
