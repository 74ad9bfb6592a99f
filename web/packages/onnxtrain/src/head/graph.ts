import type { TensorSpec } from "../manifest.js";
import { type Attribute, field, node, tensor, text, valueInfo } from "../protobuf.js";
import { concat } from "../sha256.js";

type Described = Pick<TensorSpec, "name" | "dtype" | "shape">;

/** Builder of an ONNX graph. Values are given by name; `prefix` makes the names of a subgraph unique. */
export class Graph {
  readonly #nodes: Uint8Array[] = [];
  readonly #constants = new Map<string, { name: string; bytes: Uint8Array }>();
  #count = 0;

  constructor(readonly prefix = "") {}

  /** Adds a node with one output and returns the name of the output. */
  op(type: string, inputs: readonly string[], attributes: Readonly<Record<string, Attribute>> = {}, name?: string): string {
    const result = name ?? `${this.prefix}${type}_${this.#count++}`;
    this.add(type, inputs, [result], attributes);
    return result;
  }

  /** Adds a node with the given output names. */
  add(type: string, inputs: readonly string[], outputs: readonly string[], attributes: Readonly<Record<string, Attribute>> = {}): void {
    this.#nodes.push(field(1, node(type, inputs, outputs, attributes)));
  }

  /** Returns a float32 scalar constant. */
  float(value: number): string {
    return this.#constant("float32", [], Float32Array.of(value));
  }

  /** Returns a float32 constant. */
  floats(dims: readonly number[], values: readonly number[]): string {
    return this.#constant("float32", dims, Float32Array.from(values));
  }

  /** Returns an int64 or int32 scalar constant. */
  integer(value: number, dtype = "int64"): string {
    return this.#constant(dtype, [], dtype === "int32" ? Int32Array.of(value) : BigInt64Array.of(BigInt(value)));
  }

  /** Returns an int64 vector constant, as used for axes and shapes. */
  list(...values: readonly number[]): string {
    return this.#constant("int64", [values.length], BigInt64Array.from(values, BigInt));
  }

  /** Returns the class indices 0, ..., `count` - 1 as a constant [1, count]. */
  classes(count: number, dtype: "int32" | "float32"): string {
    const values = Array.from({ length: count }, (_, i) => i);
    return this.#constant(dtype, [1, count], dtype === "int32" ? Int32Array.from(values) : Float32Array.from(values));
  }

  #constant(dtype: string, dims: readonly number[], data: Float32Array | Int32Array | BigInt64Array): string {
    const key = `${dtype} ${dims.join()}: ${data.join()}`;
    let known = this.#constants.get(key);
    if (!known) {
      const name = `${this.prefix}const_${this.#constants.size}`;
      known = { name, bytes: field(5, tensor(name, dtype, dims, new Uint8Array(data.buffer))) };
      this.#constants.set(key, known);
    }
    return known.name;
  }

  /** Encodes the graph; the tensors in `weights` are its last fields, in order. */
  bytes(name: string, inputs: readonly Described[], outputs: readonly Described[], weights: readonly Uint8Array[] = []): Uint8Array {
    return concat([
      ...this.#nodes, text(2, name), ...[...this.#constants.values()].map((c) => c.bytes),
      ...inputs.map((t) => field(11, valueInfo(t))), ...outputs.map((t) => field(12, valueInfo(t))),
      ...weights.map((w) => field(5, w)),
    ]);
  }
}
