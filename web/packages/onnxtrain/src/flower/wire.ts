import { OnnxTrainError } from "../errors.js";
import { concat } from "../sha256.js";

/** The SuperLink is unreachable, rejects this node, or does not speak the protocol of Flower 1.40 to 1.42. */
export class FlowerError extends OnnxTrainError {
  override name = "FlowerError";
  /** HTTP status; 0 if there was no response. */
  readonly status: number;
  /** Flower's error code; 0 if there is none. */
  readonly code: number;

  constructor(message: string, status = 0, code = 0) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The part of the protobuf wire format that Flower's messages use.

const encoder = new TextEncoder();
const decoder = new TextDecoder();

export const textBytes = (text: string): Uint8Array => encoder.encode(text);
export const bytesText = (bytes: Uint8Array): string => decoder.decode(bytes);

/** Encodes an unsigned 64-bit integer as a varint. */
export function varint(value: bigint): Uint8Array {
  const out: number[] = [];
  let rest = BigInt.asUintN(64, value);
  for (; rest > 127n; rest >>= 7n) out.push(Number(rest & 127n) | 128);
  out.push(Number(rest));
  return Uint8Array.from(out);
}

/** Zigzag encoding of signed integers: 0, -1, 1, -2 become 0, 1, 2, 3. */
export const zigzag = (value: bigint): bigint => (value < 0n ? -2n * value - 1n : 2n * value);
export const unzigzag = (value: bigint): bigint => (value & 1n ? -((value + 1n) >> 1n) : value >> 1n);

/** Writes fields. As in proto3, zero and empty values are omitted, except by the `set` methods. */
export class Writer {
  readonly #parts: Uint8Array[] = [];

  #field(field: number, type: number, ...content: Uint8Array[]): this {
    this.#parts.push(varint(BigInt((field << 3) | type)), ...content);
    return this;
  }

  setUint(field: number, value: bigint): this {
    return this.#field(field, 0, varint(value));
  }

  setDouble(field: number, value: number): this {
    const data = new Uint8Array(8);
    new DataView(data.buffer).setFloat64(0, value, true);
    return this.#field(field, 1, data);
  }

  setBytes(field: number, value: Uint8Array): this {
    return this.#field(field, 2, varint(BigInt(value.length)), value);
  }

  uint(field: number, value: bigint): this {
    return value === 0n ? this : this.setUint(field, value);
  }

  double(field: number, value: number): this {
    return Object.is(value, 0) ? this : this.setDouble(field, value);
  }

  bytes(field: number, value: Uint8Array): this {
    return value.length === 0 ? this : this.setBytes(field, value);
  }

  text(field: number, value: string): this {
    return this.bytes(field, textBytes(value));
  }

  /** Writes another message as a field of this one. */
  message(field: number, inner: Writer): this {
    return this.setBytes(field, inner.done());
  }

  done(): Uint8Array {
    return concat(this.#parts);
  }
}

type Value = bigint | number | Uint8Array;

/** Parsed fields by number. For repeated fields the getters of single values return the last one. */
export class Fields {
  readonly #values = new Map<number, Value[]>();
  /** The number of the first field: the case of a `oneof`. */
  first = 0;

  constructor(data: Uint8Array) {
    const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
    let at = 0;
    const take = (n: number): number => {
      if (n > data.length - at) throw broken();
      at += n;
      return at - n;
    };
    const next = (): bigint => {
      const start = at;
      while (at < data.length && data[at]! > 127) at++;
      take(1);
      return unpacked(data.subarray(start, at))[0]!;
    };
    while (at < data.length) {
      const key = Number(next());
      const type = key & 7;
      let value: Value | undefined;
      if (type === 0) value = next();
      else if (type === 1) value = view.getFloat64(take(8), true);
      else if (type === 2) {
        const size = Number(next());
        const from = take(size);
        value = data.subarray(from, from + size);
      } else if (type === 5) take(4); // 32-bit fields are not used
      else throw broken();
      this.first ||= key >> 3;
      if (value !== undefined) this.#values.set(key >> 3, [...(this.#values.get(key >> 3) ?? []), value]);
    }
  }

  has(field: number): boolean {
    return this.#values.has(field);
  }

  uint(field: number): bigint {
    return (this.#last(field) as bigint | undefined) ?? 0n;
  }

  double(field: number): number {
    return (this.#last(field) as number | undefined) ?? 0;
  }

  bytes(field: number): Uint8Array {
    return (this.#last(field) as Uint8Array | undefined) ?? new Uint8Array();
  }

  text(field: number): string {
    return bytesText(this.bytes(field));
  }

  inner(field: number): Fields {
    return new Fields(this.bytes(field));
  }

  all(field: number): Uint8Array[] {
    return (this.#values.get(field) ?? []) as Uint8Array[];
  }

  #last(field: number): Value | undefined {
    return this.#values.get(field)?.at(-1);
  }
}

/** Decodes packed varints. */
export function unpacked(data: Uint8Array): bigint[] {
  const values: bigint[] = [];
  let value = 0n;
  let shift = 0n;
  for (const byte of data) {
    value |= BigInt(byte & 127) << shift;
    shift += 7n;
    if (byte > 127) continue;
    values.push(BigInt.asUintN(64, value));
    value = shift = 0n;
  }
  if (shift) throw broken();
  return values;
}

const broken = (): FlowerError =>
  new FlowerError("cannot parse a response of the SuperLink\nhint: the SuperLink must run Flower 1.40 to 1.42");
