import { bytesText, Fields, FlowerError, textBytes, unpacked, unzigzag, varint, Writer, zigzag } from "./wire.js";
import { count, fromBytes, type HostTensor, kindOf, toBytes } from "../dtypes.js";
import { concat, sha256 } from "../sha256.js";

/** Flower's messages: arrays in numpy's .npy format, records, content-addressed objects and metadata. */

const CODES: Readonly<Record<string, string>> = {
  float32: "<f4", float64: "<f8", float16: "<f2", int64: "<i8", int32: "<i4", int16: "<i2", int8: "|i1",
  uint64: "<u8", uint32: "<u4", uint16: "<u2", uint8: "|u1", bool: "|b1",
};
const MAGIC = [0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59];

/** Serializes an array to the same bytes as numpy, so that equal arrays have equal digests. */
export function writeNpy(tensor: HostTensor): Uint8Array {
  const code = CODES[tensor.dtype];
  if (!code) throw new FlowerError(`Flower does not support arrays of type ${tensor.dtype}`);
  const [first] = tensor.dims;
  const shape = tensor.dims.length === 1 ? `(${first},)` : `(${tensor.dims.join(", ")})`;
  let head = `{'descr': '${code}', 'fortran_order': False, 'shape': ${shape}, }`;
  // numpy leaves space for the first axis to grow and pads the header to a multiple of 64 bytes.
  if (first !== undefined) head += " ".repeat(21 - String(first).length);
  head += " ".repeat(64 - ((MAGIC.length + 4 + head.length + 1) % 64)) + "\n";
  const start = [...MAGIC, 1, 0, head.length & 255, head.length >> 8];
  return concat([Uint8Array.from(start), textBytes(head), toBytes(tensor)]);
}

/** Parses an .npy file to a little-endian array in row-major order. */
export function readNpy(file: Uint8Array): HostTensor {
  if (file.length < 10 || MAGIC.some((byte, i) => file[i] !== byte)) throw unreadable("not an .npy file");
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  const wide = file[6]! > 1;
  const at = wide ? 12 : 10;
  const size = wide ? view.getUint32(8, true) : view.getUint16(8, true);
  const head = bytesText(file.subarray(at, at + size));
  const code = /'descr': '([^']+)'/.exec(head)?.[1];
  const shape = /'shape': \(([^)]*)\)/.exec(head)?.[1];
  if (code === undefined || shape === undefined) throw unreadable(head);
  const dtype = Object.keys(CODES).find((name) => CODES[name]!.slice(1) === code.slice(1));
  if (!dtype) throw unreadable(`type ${code}`);
  const dims = shape.split(",").filter((d) => d.trim()).map(Number);
  const data = file.slice(at + size);
  const width = kindOf(dtype).size;
  if (data.length !== count(dims) * width) throw unreadable(`${data.length} bytes for shape [${dims.join(", ")}]`);
  if (code.startsWith(">")) for (let i = 0; i < data.length; i += width) data.subarray(i, i + width).reverse();
  const columns = /'fortran_order': True/.test(head) && dims.length > 1;
  return fromBytes(dtype, dims, columns ? toRowMajor(data, dims, width) : data);
}

/** Converts column-major elements to row-major order. */
function toRowMajor(data: Uint8Array, dims: readonly number[], width: number): Uint8Array {
  const steps = dims.map((_, axis) => count(dims.slice(0, axis)));
  const out = new Uint8Array(data.length);
  const index = dims.map(() => 0);
  for (let to = 0; to < data.length; to += width) {
    const from = index.reduce((sum, i, axis) => sum + i * steps[axis]!, 0) * width;
    out.set(data.subarray(from, from + width), to);
    for (let axis = dims.length - 1; axis >= 0 && ++index[axis]! === dims[axis]; axis--) index[axis] = 0;
  }
  return out;
}

const unreadable = (what: string): FlowerError => new FlowerError(`cannot parse an array: ${what}`);

// MetricRecord and ConfigRecord. A `number` is a double, a `bigint` an integer.

export type Scalar = number | bigint | boolean | string | Uint8Array;
export type RecordValue = Scalar | readonly Scalar[];
export type Values = Readonly<Record<string, RecordValue>>;

/** The largest signed 64-bit integer; larger ones are written as unsigned. */
const SIGNED = (1n << 63n) - 1n;

function writeScalar(out: Writer, value: Scalar): Writer {
  if (typeof value === "number") return out.setDouble(1, value);
  if (typeof value === "bigint") return value > SIGNED ? out.setUint(3, value) : out.setUint(2, zigzag(value));
  if (typeof value === "boolean") return out.setUint(4, value ? 1n : 0n);
  return typeof value === "string" ? out.setBytes(5, textBytes(value)) : out.setBytes(6, value);
}

function writeList(out: Writer, values: readonly Scalar[]): Writer {
  const list = new Writer();
  const [first = true] = values; // an empty list is written as a list of booleans
  if (values.some((v) => typeof v !== typeof first)) throw new FlowerError("a list in a record must contain values of one type");
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
    default: throw new FlowerError(`unknown value type in a record: field ${kind}`);
  }
}

/** Serializes a MetricRecord or ConfigRecord. */
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

/** Parses a MetricRecord or ConfigRecord. */
export function readValues(data: Uint8Array): Values {
  const items = new Fields(data).all(1).map((item) => new Fields(item));
  return Object.fromEntries(items.map((item) => [item.text(1), readValue(item.bytes(2))]));
}

// Message content is sent as objects that are addressed by their sha256: `<type> <children> <size>`, a zero byte and the
// body. An object that the receiver already has is not sent again.

/** The objects of a message, by digest. */
export type Objects = Map<string, Uint8Array>;

/** The tree of objects of a message. */
export interface Tree {
  readonly id: string;
  readonly children: readonly Tree[];
}

/** One record of a message: arrays, metrics or configuration. */
export type ContentRecord =
  | { readonly arrays: Readonly<Record<string, HostTensor>> }
  | { readonly metrics: Values }
  | { readonly config: Values };
export type Content = Readonly<Record<string, ContentRecord>>;

/** Chunk size of arrays, as in Flower. */
const CHUNK_SIZE = 5 * 1024 * 1024;

/** Adds an object to `all` and returns its node in the tree. */
export async function addObject(kind: string, children: readonly Tree[], body: Uint8Array, all: Objects): Promise<Tree> {
  const own = [...new Map(children.map((c) => [c.id, c])).values()];
  const content = concat([textBytes(`${kind} ${own.map((c) => c.id).join(",")} ${body.length}\0`), body]);
  const id = await sha256(content);
  all.set(id, content);
  return { id, children: own };
}

async function addArray(tensor: HostTensor, all: Objects): Promise<Tree> {
  const file = writeNpy(tensor);
  const pieces: Tree[] = [];
  for (let at = 0; at < file.length; at += CHUNK_SIZE) {
    pieces.push(await addObject("ArrayChunk", [], file.subarray(at, at + CHUNK_SIZE), all));
  }
  const ids = [...new Set(pieces.map((p) => p.id))];
  const order = pieces.map((p) => ids.indexOf(p.id)).join(", ");
  const head = `{"dtype": ${asPython(tensor.dtype)}, "shape": [${tensor.dims.join(", ")}], "stype": "numpy.ndarray", "arraychunk_ids": [${order}]}`;
  return await addObject("Array", pieces, textBytes(head), all);
}

/** Adds the objects of all records of a message. */
export async function addContent(content: Content, all: Objects): Promise<Tree> {
  const records: [string, Tree][] = [];
  for (const [name, record] of Object.entries(content)) {
    if ("arrays" in record) {
      const arrays: [string, Tree][] = [];
      for (const [key, tensor] of Object.entries(record.arrays)) arrays.push([key, await addArray(tensor, all)]);
      records.push([name, await addObject("ArrayRecord", arrays.map(([, t]) => t), references(arrays), all)]);
    } else {
      const [kind, values] = "metrics" in record ? ["MetricRecord", record.metrics] : ["ConfigRecord", record.config];
      records.push([name, await addObject(kind as string, [], writeValues(values as Values), all)]);
    }
  }
  return await addObject("RecordDict", records.map(([, t]) => t), references(records), all);
}

const references = (named: readonly [string, Tree][]): Uint8Array =>
  textBytes(`{${named.map(([name, tree]) => `${asPython(name)}: "${tree.id}"`).join(", ")}}`);

/** Serializes a string in ASCII, as Python's JSON does. */
const asPython = (text: string): string =>
  JSON.stringify(text).replace(/[\u0080-\uffff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** Returns the records of the message with this digest. */
export function readContent(id: string, all: Objects): Content {
  const message = open(id, all);
  if (message.kind !== "Message") throw new FlowerError(`expected an object of type Message, got ${message.kind}`);
  const [inner] = message.children;
  if (inner === undefined) return {};
  const named = JSON.parse(bytesText(open(inner, all).body)) as Record<string, string>;
  return Object.fromEntries(Object.entries(named).map(([name, id]) => [name, readRecord(id, all)]));
}

function readRecord(id: string, all: Objects): ContentRecord {
  const { kind, body } = open(id, all);
  if (kind === "MetricRecord") return { metrics: readValues(body) };
  if (kind === "ConfigRecord") return { config: readValues(body) };
  if (kind !== "ArrayRecord") throw new FlowerError(`unknown record type: ${kind}`);
  const named = JSON.parse(bytesText(body)) as Record<string, string>;
  return { arrays: Object.fromEntries(Object.entries(named).map(([name, id]) => [name, readArray(id, all)])) };
}

function readArray(id: string, all: Objects): HostTensor {
  const { body, children } = open(id, all);
  const head = JSON.parse(bytesText(body)) as { stype: string; arraychunk_ids: number[] };
  if (head.stype !== "numpy.ndarray") throw new FlowerError(`unknown array type: ${head.stype}`);
  return readNpy(concat(head.arraychunk_ids.map((i) => open(children[i]!, all).body)));
}

function open(id: string, all: Objects): { kind: string; children: string[]; body: Uint8Array } {
  const content = all.get(id);
  if (!content) throw new FlowerError(`missing object ${id}`);
  const zero = content.indexOf(0);
  const [kind = "", children = "", size] = bytesText(content.subarray(0, zero)).split(" ");
  const body = content.subarray(zero + 1);
  if (body.length !== Number(size)) throw new FlowerError(`truncated object ${id}`);
  return { kind, children: children ? children.split(",") : [], body };
}

export const writeTree = (tree: Tree): Writer =>
  tree.children.reduce((out, child) => out.message(2, writeTree(child)), new Writer().text(1, tree.id));

export function readTree(data: Uint8Array): Tree {
  const fields = new Fields(data);
  return { id: fields.text(1), children: fields.all(2).map(readTree) };
}

/** Returns the distinct digests of a tree, children first. */
export function digests(tree: Tree, all = new Set<string>()): Set<string> {
  for (const child of tree.children) digests(child, all);
  return all.add(tree.id);
}

// Metadata and replies. All ids have 64 bits.

export interface Metadata {
  readonly runId: bigint;
  readonly messageId: string;
  readonly from: bigint;
  readonly to: bigint;
  readonly replyTo: string;
  readonly group: string;
  /** Time to live in seconds. */
  readonly ttl: number;
  /** `train`, `evaluate` or `query`, optionally followed by a dot and a name. */
  readonly type: string;
  /** Seconds since 1970. */
  readonly createdAt: number;
  readonly fromTask?: bigint | undefined;
  readonly toTask?: bigint | undefined;
}

/** An error on this node. */
export interface Failure {
  readonly code: bigint;
  readonly reason: string;
}

/** Flower's error code for an exception in a ClientApp. */
export const CLIENT_APP_RAISED = 2n;

export function writeMetadata(m: Metadata): Writer {
  const out = new Writer().uint(1, m.runId).text(2, m.messageId).uint(3, m.from).uint(4, m.to).text(5, m.replyTo);
  out.text(6, m.group).double(7, m.ttl).text(8, m.type).double(9, m.createdAt);
  if (m.fromTask !== undefined) out.setUint(10, m.fromTask);
  if (m.toTask !== undefined) out.setUint(11, m.toTask);
  return out;
}

/** Parses the metadata of a message. */
export function readMetadata(message: Uint8Array): Metadata {
  const f = new Fields(message).inner(1);
  return {
    runId: f.uint(1), messageId: f.text(2), from: f.uint(3), to: f.uint(4), replyTo: f.text(5), group: f.text(6),
    ttl: f.double(7), type: f.text(8), createdAt: f.double(9),
    fromTask: f.has(10) ? f.uint(10) : undefined, toTask: f.has(11) ? f.uint(11) : undefined,
  };
}

export const writeNode = (node: bigint): Writer => new Writer().message(1, new Writer().uint(1, node));

/** A reply that is ready to be sent. */
export interface Reply {
  readonly id: string;
  readonly runId: bigint;
  /** The body of the call `push-messages`. */
  readonly request: Uint8Array;
  readonly objects: Objects;
}

/** Creates the reply to a message: content, or an error. */
export async function makeReply(
  node: bigint, received: Metadata, result: { content: Content } | { failure: Failure }, now: number, seconds: number,
): Promise<Reply> {
  const objects: Objects = new Map();
  const metadata: Metadata = {
    runId: received.runId, messageId: "", from: received.to, to: received.from, replyTo: received.messageId, group: received.group,
    ttl: received.createdAt + received.ttl - now, type: received.type, createdAt: now,
    fromTask: received.toTask, toTask: received.fromTask,
  };
  const failed = "failure" in result;
  const failure = new Writer();
  if (failed) failure.uint(1, zigzag(result.failure.code)).text(2, result.failure.reason);
  const body = new Writer().message(1, writeMetadata(metadata));
  if (failed) body.message(3, failure);
  const children: Tree[] = failed ? [] : [await addContent(result.content, objects)];
  const tree = await addObject("Message", children, body.done(), objects);
  const message = new Writer().message(1, writeMetadata({ ...metadata, messageId: tree.id }));
  // The content is sent as objects, but the field has to be present.
  if (failed) message.message(3, failure);
  else message.message(2, new Writer());
  const request = writeNode(node).message(2, message).message(3, writeTree(tree));
  request.setBytes(4, new Uint8Array(Float64Array.of(seconds).buffer));
  return { id: tree.id, runId: received.runId, request: request.done(), objects };
}
