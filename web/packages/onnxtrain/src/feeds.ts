import { count, decode, encode, type HostTensor, kindOf, type TypedArray } from "./dtypes.js";
import { ShapeError } from "./errors.js";
import type { TensorSpec } from "./manifest.js";

type Scalar = number | bigint | boolean;
type Nested = Scalar | readonly Nested[];

/**
 * Accepted forms of a tensor: a typed array, plain or nested arrays, a number, or an object with `data` and
 * `dims` (such as ONNX Runtime's tensors). Flat arrays are reshaped to the shape in the manifest if at most one
 * of its sizes is unknown.
 */
export type TensorLike =
  | Nested
  | TypedArray
  | Uint8ClampedArray
  | { readonly data: unknown; readonly dims?: readonly number[]; readonly shape?: readonly number[]; readonly type?: string; readonly dtype?: string };

/** A batch: tensors by the names of the model's inputs and targets. */
export type Batch = Readonly<Record<string, TensorLike>>;

type Elements = ArrayLike<number> | ArrayLike<bigint>;

interface Given {
  readonly elements: Elements;
  /** The numpy name of the dtype, or `number` for plain arrays. */
  readonly dtype: string;
  readonly dims: readonly number[] | undefined;
}

/** Validates a batch against the inputs of a model: checks names and shapes, converts dtypes without loss. */
export function feed(specs: readonly TensorSpec[], batch: Batch): Map<string, HostTensor> {
  const names = specs.map((s) => s.name);
  const hint = `hint: the inputs are ${names.join(", ")}`;
  if (typeof batch !== "object" || batch === null) {
    throw new ShapeError(`expected an object of tensors by name\n${hint}`);
  }
  const unknown = Object.keys(batch).filter((n) => !names.includes(n));
  if (unknown.length) throw new ShapeError(`unknown input: ${unknown.join(", ")}\n${hint}`);
  const missing = names.filter((n) => batch[n] === undefined || batch[n] === null);
  if (missing.length) throw new ShapeError(`missing from the batch: ${missing.join(", ")}\n${hint}`);
  const given = new Map(specs.map((s) => [s.name, read(s, batch[s.name]!)]));
  const sizes = new Map<string, { size: number; by: string }>();
  // Tensors with a shape bind the symbolic sizes first; flat arrays are then reshaped with them.
  for (const s of specs) bind(s, given.get(s.name)!.dims, sizes);
  for (const s of specs) {
    const g = given.get(s.name)!;
    if (!g.dims) {
      const dims = infer(s, g.elements.length, sizes);
      given.set(s.name, { ...g, dims });
      bind(s, dims, sizes);
    }
  }
  return new Map(
    specs.map((s) => {
      const g = given.get(s.name)!;
      return [s.name, { dtype: s.dtype, dims: g.dims!, data: convert(s, g) }];
    }),
  );
}

/** Converts one value to a tensor of a fixed shape, to set a parameter. */
export function fit(spec: { name: string; dtype: string; shape: readonly number[] }, value: TensorLike): HostTensor {
  return feed([{ ...spec, role: "input", feeds: null }], { [spec.name]: value }).get(spec.name)!;
}

const expectation = (s: TensorSpec): string => `'${s.name}' is ${s.dtype}[${s.shape.join(", ")}]`;

function read(spec: TensorSpec, value: TensorLike): Given {
  if (ArrayBuffer.isView(value)) {
    return { elements: value as unknown as Elements, dtype: nameOf(value), dims: undefined };
  }
  if (Array.isArray(value) || typeof value !== "object") {
    const dims: number[] = [];
    for (let v: unknown = value; Array.isArray(v); v = v[0]) dims.push(v.length);
    const flat: (number | bigint)[] = [];
    flatten(spec, value as Nested, dims, 0, flat);
    const dtype = flat.some((v) => typeof v === "bigint") ? "int64" : "number";
    const elements = dtype === "int64" ? flat.map((v) => BigInt(v)) : (flat as number[]);
    // A flat list can be reshaped to any shape.
    return { elements, dtype, dims: dims.length === 1 && spec.shape.length !== 1 ? undefined : dims };
  }
  const { data, dims, shape, type, dtype } = value as { data: unknown; dims?: readonly number[]; shape?: readonly number[]; type?: string; dtype?: string };
  const inner = read(spec, data as TensorLike);
  const stated = dims ?? shape ?? inner.dims;
  if (stated && count(stated) !== inner.elements.length) {
    throw new ShapeError(
      `${expectation(spec)}, got ${inner.elements.length} elements for shape [${stated.join(", ")}]`,
    );
  }
  return { elements: inner.elements, dtype: type ?? dtype ?? inner.dtype, dims: stated };
}

function flatten(
  spec: TensorSpec, value: Nested, dims: readonly number[], depth: number, out: (number | bigint)[],
): void {
  if (Array.isArray(value)) {
    if (value.length !== dims[depth]) throw new ShapeError(`${expectation(spec)}, got rows of unequal length`);
    for (const v of value as readonly Nested[]) flatten(spec, v, dims, depth + 1, out);
  } else if (depth !== dims.length) {
    throw new ShapeError(`${expectation(spec)}, got rows of unequal length`);
  } else if (typeof value === "number" || typeof value === "bigint") out.push(value);
  else if (typeof value === "boolean") out.push(Number(value));
  else throw new ShapeError(`${expectation(spec)}, got ${value === null ? "null" : typeof value}`);
}

/** Returns the numpy name of the elements of a typed array. */
export function nameOf(array: ArrayBufferView): string {
  const name = array.constructor.name;
  if (name === "Uint8ClampedArray" || name === "Buffer") return "uint8";
  return name.replace("Array", "").replace("Big", "").replace("Uint", "uint").replace("Int", "int").replace("Float", "float");
}

function bind(
  s: TensorSpec, dims: readonly number[] | undefined, sizes: Map<string, { size: number; by: string }>,
): void {
  if (!dims) return;
  const got = `got shape [${dims.join(", ")}]`;
  if (dims.length !== s.shape.length) throw new ShapeError(`${expectation(s)}, ${got}`);
  s.shape.forEach((dim, i) => {
    const have = dims[i]!;
    if (typeof dim === "number") {
      if (have !== dim) throw new ShapeError(`${expectation(s)}, ${got}`);
    } else if (isSymbol(dim)) {
      const known = sizes.get(dim);
      if (!known) sizes.set(dim, { size: have, by: s.name });
      else if (known.size !== have) {
        throw new ShapeError(
          `${expectation(s)}, but ${dim} is ${have} here and ${known.size} in '${known.by}'`,
        );
      }
    }
  });
}

const isSymbol = (dim: string): boolean => /^[\p{L}_][\p{L}\p{N}_]*$/u.test(dim);

function infer(s: TensorSpec, length: number, sizes: Map<string, { size: number; by: string }>): number[] {
  const dims = s.shape.map((d) => (typeof d === "number" ? d : (sizes.get(d)?.size ?? -1)));
  const open = dims.filter((d) => d < 0).length;
  const known = dims.filter((d) => d >= 0).reduce((a, b) => a * b, 1);
  const got = `got ${length} elements`;
  if (open === 1 && known > 0 && length % known === 0) {
    return dims.map((d) => (d < 0 ? length / known : d));
  }
  if (open === 0 && known === length) return dims;
  const hint = open > 1 ? "\nhint: pass { data, dims }" : "";
  const bound = s.shape.flatMap((d) => (sizes.has(String(d)) ? [`${d} is ${sizes.get(String(d))!.size} in '${sizes.get(String(d))!.by}'`] : []));
  throw new ShapeError(`${expectation(s)}, ${got}${bound.length ? `, but ${[...new Set(bound)].join(", ")}` : ""}${hint}`);
}

const RANGES: Record<string, readonly [number, number]> = {
  bool: [0, 1], int8: [-128, 127], uint8: [0, 255], int16: [-32768, 32767], uint16: [0, 65535],
  int32: [-(2 ** 31), 2 ** 31 - 1], uint32: [0, 2 ** 32 - 1],
  float16: [-2048, 2048], bfloat16: [-256, 256], float32: [-(2 ** 24), 2 ** 24],
};
const isFloat = (dtype: string): boolean => dtype.includes("float");

/** Converts elements to the dtype of an input. Rounding of fractions is allowed; any other change of a value throws. */
function convert(spec: TensorSpec, given: Given): TypedArray {
  const { elements, dtype } = given;
  const k = kindOf(spec.dtype, `'${spec.name}'`);
  if (dtype === spec.dtype && elements instanceof (k.array as unknown as new () => object)) {
    return elements as unknown as TypedArray;
  }
  const named = dtype === "number" ? "numbers" : dtype;
  const fail = (value: unknown): never => {
    throw new ShapeError(`'${spec.name}' is ${spec.dtype}, got ${named} with values that do not fit: ${String(value)}`);
  };
  const wide = spec.dtype === "int64" || spec.dtype === "uint64";
  const data = new k.array(elements.length);
  // Numbers in plain arrays have no dtype: they may be rounded like floats.
  const fromFloat = dtype === "number" || isFloat(dtype);
  const toFloat = isFloat(spec.dtype);
  const range = RANGES[spec.dtype];
  const raw16 = (dtype === "float16" || dtype === "bfloat16") && elements instanceof Uint16Array;
  for (let i = 0; i < elements.length; i++) {
    const e = elements[i]!;
    if (wide) {
      if (typeof e !== "bigint" && !Number.isSafeInteger(e)) fail(e);
      const b = BigInt(e);
      if ((spec.dtype === "int64" ? BigInt.asIntN(64, b) : BigInt.asUintN(64, b)) !== b) fail(e);
      (data as BigInt64Array)[i] = b;
      continue;
    }
    const v = raw16 ? decode(dtype, e as number) : Number(e);
    if (typeof e === "bigint" && BigInt(Number.isFinite(v) ? v : 0) !== e) fail(e);
    if (!toFloat) {
      if (!Number.isInteger(v) || v < range![0] || v > range![1]) fail(v);
    } else if (!fromFloat && spec.dtype !== "float64") {
      // Integers must convert exactly; beyond this range not all of them are representable.
      if ((v < range![0] || v > range![1]) && decode(spec.dtype, encode(spec.dtype, spec.dtype === "float32" ? Math.fround(v) : v)) !== v) fail(v);
    }
    const stored = encode(spec.dtype, v);
    (data as Float32Array)[i] = stored;
    if (toFloat && Number.isFinite(v) && !Number.isFinite(decode(spec.dtype, (data as Float32Array)[i]!))) fail(v);
  }
  return data;
}
