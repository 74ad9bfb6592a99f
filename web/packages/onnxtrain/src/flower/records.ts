/** Records of numbers and settings. A `number` is a double, a `bigint` a whole number. */
import { concat } from "../sha256.js";
import { FlowerError } from "./errors.js";
import { bytesText, Fields, textBytes, unpacked, unzigzag, varint, Writer, zigzag } from "./wire.js";

export type Scalar = number | bigint | boolean | string | Uint8Array;
export type RecordValue = Scalar | readonly Scalar[];
export type Values = Readonly<Record<string, RecordValue>>;

/** The largest number that the signed kind holds. */
const SIGNED = (1n << 63n) - 1n;

function writeScalar(out: Writer, value: Scalar): Writer {
  if (typeof value === "number") return out.setDouble(1, value);
  if (typeof value === "bigint") return value > SIGNED ? out.setUint(3, value) : out.setUint(2, zigzag(value));
  if (typeof value === "boolean") return out.setUint(4, value ? 1n : 0n);
  return typeof value === "string" ? out.setBytes(5, textBytes(value)) : out.setBytes(6, value);
}

function writeList(out: Writer, values: readonly Scalar[]): Writer {
  const list = new Writer();
  const [first = true] = values; // an empty list is one of truth values
  if (values.some((v) => typeof v !== typeof first)) throw new FlowerError("a list of a record mixes kinds of values");
  if (typeof first === "number") {
    return out.message(21, list.bytes(1, new Uint8Array(Float64Array.from(values as number[]).buffer)));
  }
  if (typeof first === "bigint") {
    const whole = values as bigint[];
    const large = whole.some((v) => v > SIGNED);
    return out.message(large ? 23 : 22, list.bytes(1, concat(whole.map((v) => varint(large ? v : zigzag(v))))));
  }
  if (typeof first === "boolean") return out.message(24, list.bytes(1, Uint8Array.from(values as boolean[], Number)));
  const text = typeof first === "string";
  for (const value of values) list.setBytes(1, text ? textBytes(value as string) : (value as Uint8Array));
  return out.message(text ? 25 : 26, list);
}

function readValue(data: Uint8Array): RecordValue {
  const fields = new Fields(data);
  const kind = fields.first;
  const packed = () => unpacked(concat(fields.inner(kind).all(1)));
  switch (kind) {
    case 1: return fields.double(1);
    case 2: return unzigzag(fields.uint(2));
    case 3: return fields.uint(3);
    case 4: return fields.uint(4) !== 0n;
    case 5: return fields.text(5);
    case 6: return fields.bytes(6);
    case 21: return [...new Float64Array(concat(fields.inner(21).all(1)).slice().buffer)];
    case 22: return packed().map(unzigzag);
    case 23: return packed();
    case 24: return packed().map((v) => v !== 0n);
    case 25: return fields.inner(25).all(1).map(bytesText);
    case 26: return fields.inner(26).all(1);
    default: throw new FlowerError(`a record has a value of kind ${kind}, which is not known here`);
  }
}

/** Gives the bytes of a MetricRecord or ConfigRecord. */
export function writeValues(values: Values): Uint8Array {
  const out = new Writer();
  for (const [name, value] of Object.entries(values)) {
    const inner = new Writer();
    if (Array.isArray(value)) writeList(inner, value as readonly Scalar[]);
    else writeScalar(inner, value as Scalar);
    out.message(1, new Writer().text(1, name).message(2, inner));
  }
  return out.done();
}

/** Gives what a MetricRecord or ConfigRecord says. */
export function readValues(data: Uint8Array): Values {
  const items = new Fields(data).all(1).map((item) => new Fields(item));
  return Object.fromEntries(items.map((item) => [item.text(1), readValue(item.bytes(2))]));
}
