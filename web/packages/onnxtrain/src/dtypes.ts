import { ShapeError } from "./errors.js";

/** Typed arrays that tensors are made of; float16 and bfloat16 are raw bits. */
export type TypedArray =
  | Float32Array | Float64Array | Int8Array | Uint8Array | Int16Array | Uint16Array
  | Int32Array | Uint32Array | BigInt64Array | BigUint64Array;

/** A tensor in plain memory. */
export interface HostTensor {
  readonly dtype: string;
  readonly dims: readonly number[];
  readonly data: TypedArray;
}

type Maker = {
  new (buffer: ArrayBufferLike, offset?: number, length?: number): TypedArray;
  new (length: number): TypedArray;
};

interface Kind {
  readonly array: Maker;
  readonly size: number;
  /** The dtype name in safetensors files. */
  readonly stored: string;
}

const kind = (array: unknown, size: number, stored: string): Kind => ({
  array: array as Maker, size, stored,
});

const KINDS: Record<string, Kind> = {
  bool: kind(Uint8Array, 1, "BOOL"),
  uint8: kind(Uint8Array, 1, "U8"),
  int8: kind(Int8Array, 1, "I8"),
  int16: kind(Int16Array, 2, "I16"),
  uint16: kind(Uint16Array, 2, "U16"),
  float16: kind(Uint16Array, 2, "F16"),
  bfloat16: kind(Uint16Array, 2, "BF16"),
  int32: kind(Int32Array, 4, "I32"),
  uint32: kind(Uint32Array, 4, "U32"),
  float32: kind(Float32Array, 4, "F32"),
  float64: kind(Float64Array, 8, "F64"),
  int64: kind(BigInt64Array, 8, "I64"),
  uint64: kind(BigUint64Array, 8, "U64"),
};

const BY_STORED = new Map(Object.entries(KINDS).map(([name, k]) => [k.stored, name]));

/** Returns the array type and element size of a dtype, given by its numpy name. */
export function kindOf(dtype: string, where = "tensor"): Kind {
  const info = KINDS[dtype];
  if (!info) throw new ShapeError(`${where}: dtype ${dtype} is not supported`);
  return info;
}

/** Returns the numpy name of a safetensors dtype, if there is one. */
export const fromStored = (stored: string): string | undefined => BY_STORED.get(stored);

/** Returns the number of elements of a shape. */
export const count = (dims: readonly number[]): number => dims.reduce((a, b) => a * b, 1);

/** Returns a tensor from a copy of raw little-endian bytes. */
export function fromBytes(dtype: string, dims: readonly number[], bytes: Uint8Array): HostTensor {
  const k = kindOf(dtype);
  return { dtype, dims, data: new k.array(bytes.slice().buffer, 0, bytes.length / k.size) };
}

/** Returns the raw little-endian bytes of a tensor, without a copy. */
export const toBytes = (t: HostTensor): Uint8Array =>
  new Uint8Array(t.data.buffer, t.data.byteOffset, t.data.byteLength);

/** Returns a tensor filled with one value. */
export function filled(dtype: string, dims: readonly number[], value: number): HostTensor {
  const data = new (kindOf(dtype).array)(count(dims));
  if (value !== 0) {
    if (data instanceof BigInt64Array || data instanceof BigUint64Array) data.fill(BigInt(value));
    else data.fill(encode(dtype, value));
  }
  return { dtype, dims, data };
}

/** Casts a floating-point tensor to another floating-point dtype, with rounding. */
export function castFloat(t: HostTensor, dtype: string | undefined): HostTensor {
  if (dtype === undefined || dtype === t.dtype) return t;
  const values = Array.from(t.data as Float32Array, (v) => encode(dtype, decode(t.dtype, v)));
  return { dtype, dims: t.dims, data: new (kindOf(dtype).array)(values as never) };
}

/** Encodes a number for storage: unchanged, or as the bits of a 16-bit float. */
export function encode(dtype: string, value: number): number {
  if (dtype === "float16") return toHalf(value);
  if (dtype === "bfloat16") return toBrain(value);
  return value;
}

/** Decodes a stored element to a number. */
export function decode(dtype: string, stored: number): number {
  if (dtype === "float16") return fromHalf(stored);
  if (dtype === "bfloat16") {
    BITS[0] = stored << 16;
    return FLOAT[0]!;
  }
  return stored;
}

const FLOAT = new Float32Array(1);
const BITS = new Uint32Array(FLOAT.buffer);

function toBrain(value: number): number {
  FLOAT[0] = value;
  const bits = BITS[0]!;
  if (Number.isNaN(value)) return 0x7fc0;
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

function toHalf(value: number): number {
  if (Number.isNaN(value)) return 0x7e00;
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (size >= 65520) return sign | 0x7c00; // rounds to infinity
  FLOAT[0] = size;
  // Subnormals (below 2^-14) have a fixed spacing of 2^-24; rounding up into the next binade carries into the exponent bits.
  const exponent = Math.max((BITS[0]! >>> 23) - 127, -14);
  const mantissa = roundEven(size * 2 ** (10 - exponent));
  return sign | ((exponent + 14) * 1024 + mantissa);
}

function roundEven(x: number): number {
  const low = Math.floor(x);
  const rest = x - low;
  if (rest !== 0.5) return rest < 0.5 ? low : low + 1;
  return low % 2 === 0 ? low : low + 1;
}

function fromHalf(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const mantissa = bits & 1023;
  if (exponent === 31) return mantissa ? NaN : sign * Infinity;
  return exponent === 0
    ? sign * mantissa * 2 ** -24
    : sign * (1024 + mantissa) * 2 ** (exponent - 25);
}
