import { count, fromBytes, fromStored, type HostTensor, kindOf, toBytes } from "./dtypes.js";
import { CheckpointError } from "./errors.js";
import { byCodePoint, compact, entries, float, join, write } from "./json-text.js";
import { concat, sha256 } from "./sha256.js";

/** The metadata of a checkpoint: JSON text by key, sorted when written. */
export type Meta = ReadonlyMap<string, string>;

export interface Checkpoint {
  readonly tensors: ReadonlyMap<string, HostTensor>;
  readonly meta: Meta;
}

const KEY = "onnxtrain";
const DIGEST = "sha256";
const NO_DIGEST = "0".repeat(64);
/** Marks our checkpoints even if the metadata key is damaged. */
const RECORDED = /"sha256":"[0-9a-f]{64}"/;
const HEADER_LIMIT = 100_000_000;

/** Returns the name of an optimizer state tensor in a checkpoint. */
export const stateKey = (parameter: string, slot: string): string => `optim/${slot}/${parameter}`;

/** Serializes a checkpoint, to the same bytes as Python. */
export async function writeCheckpoint(
  tensors: ReadonlyMap<string, HostTensor>,
  meta: Meta,
): Promise<Uint8Array> {
  const text = join(new Map([...meta, [DIGEST, JSON.stringify(NO_DIGEST)]]));
  const { header, data } = serialize(tensors, { [KEY]: text });
  const digest = await sha256(header, ...data);
  const position = indexOf(header, new TextEncoder().encode(NO_DIGEST));
  header.set(new TextEncoder().encode(digest), position);
  return concat([headerLength(header), header, ...data]);
}

/** Serializes a plain safetensors file with the metadata of other tools. */
export function plainSafetensors(tensors: ReadonlyMap<string, HostTensor>, metadata: Readonly<Record<string, string>>): Uint8Array {
  const { header, data } = serialize(tensors, metadata);
  return concat([headerLength(header), header, ...data]);
}

function serialize(tensors: ReadonlyMap<string, HostTensor>, metadata: Readonly<Record<string, string>>) {
  const size = (name: string) => kindOf(tensors.get(name)!.dtype, name).size;
  // Wide dtypes first, so that every tensor is aligned; then by name.
  const order = [...tensors.keys()].sort((a, b) => size(b) - size(a) || byCodePoint(a, b));
  const head = [`"__metadata__":${JSON.stringify(metadata)}`];
  const data: Uint8Array[] = [];
  let at = 0;
  for (const name of order) {
    const t = tensors.get(name)!;
    const bytes = toBytes(t);
    const { stored } = kindOf(t.dtype, name);
    head.push(
      `${JSON.stringify(name)}:{"dtype":"${stored}","shape":[${t.dims.join(",")}],` +
        `"data_offsets":[${at},${at + bytes.length}]}`,
    );
    at += bytes.length;
    data.push(bytes);
  }
  const header = new TextEncoder().encode(`{${head.join(",")}}`);
  return { header: concat([header, new Uint8Array(-header.length & 7).fill(32)]), data };
}

function headerLength(header: Uint8Array): Uint8Array {
  const length = new Uint8Array(8);
  new DataView(length.buffer).setBigUint64(0, BigInt(header.length), true);
  return length;
}

/** Parses a checkpoint or any other safetensors file; throws if it is damaged. */
export async function readCheckpoint(data: Uint8Array, label = "checkpoint"): Promise<Checkpoint> {
  const { header, start } = readHeader(data, label);
  const { __metadata__: entry, ...rest } = header;
  const tensorInfos = Object.entries(rest).map(([name, info]) => describe(name, info, label));
  tensorInfos.sort((a, b) => a.begin - b.begin);
  const tensors = new Map<string, HostTensor>();
  let expected = 0;
  for (const { name, dtype, dims, begin, end } of tensorInfos) {
    const size = count(dims) * kindOf(dtype).size;
    if (begin !== expected || end - begin !== size) {
      throw new CheckpointError(`${label}: tensor '${name}' does not match its data_offsets`);
    }
    if (start + end > data.length) {
      throw new CheckpointError(
        `${label}: truncated, tensor '${name}' ends at byte ${start + end} of ${data.length}`,
      );
    }
    tensors.set(name, fromBytes(dtype, dims, data.subarray(start + begin, start + end)));
    expected = end;
  }
  const after = data.length - start - expected;
  if (after !== 0) throw new CheckpointError(`${label}: ${after} bytes after the last tensor`);
  const meta = readMeta(entry, label);
  await checkDigest(data, start, meta, label);
  meta.delete(DIGEST);
  return { tensors, meta };
}

function readHeader(data: Uint8Array, label: string): { header: Record<string, unknown>; start: number } {
  if (data.length < 8) {
    throw new CheckpointError(`${label}: not a checkpoint, only ${data.length} bytes long`);
  }
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const size = Number(view.getBigUint64(0, true));
  if (size > HEADER_LIMIT || 8 + size > data.length) {
    throw new CheckpointError(`${label}: not a checkpoint, or truncated in the header`);
  }
  let header: unknown;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(data.subarray(8, 8 + size)));
  } catch (error) {
    throw new CheckpointError(`${label}: the header is damaged: ${(error as Error).message}`);
  }
  if (!isObject(header)) throw new CheckpointError(`${label}: the header is not an object`);
  return { header, start: 8 + size };
}

function describe(name: string, info: unknown, label: string) {
  const wrong = (what: string) =>
    new CheckpointError(`${label}: invalid header entry of tensor '${name}': ${what}`);
  if (!isObject(info)) throw wrong("not an object");
  const { dtype: stored, shape, data_offsets: offsets } = info;
  const dtype = typeof stored === "string" ? fromStored(stored) : undefined;
  if (dtype === undefined) throw wrong(`dtype ${JSON.stringify(stored)}`);
  const sizes = (v: unknown): v is number[] =>
    Array.isArray(v) && v.every((n) => Number.isSafeInteger(n) && (n as number) >= 0);
  if (!sizes(shape) || !sizes(offsets) || offsets.length !== 2) throw wrong("shape or data_offsets are not lists of integers");
  return { name, dtype, dims: shape, begin: offsets[0]!, end: offsets[1]! };
}

function readMeta(entry: unknown, label: string): Map<string, string> {
  const text = isObject(entry) && Object.hasOwn(entry, KEY) ? entry[KEY] : undefined;
  if (text === undefined) {
    const ours = isObject(entry) && Object.values(entry).some((v) => typeof v === "string" && RECORDED.test(v));
    if (ours) throw new CheckpointError(`${label}: the metadata is damaged: '${KEY}' is missing`);
    return new Map(); // a plain safetensors file of another tool
  }
  try {
    if (!isObject(JSON.parse(text as string))) throw new Error("not an object");
    return entries(compact(text as string));
  } catch (error) {
    throw new CheckpointError(`${label}: the metadata is damaged: ${(error as Error).message}`);
  }
}

async function checkDigest(data: Uint8Array, start: number, meta: Meta, label: string): Promise<void> {
  const recorded = meta.get(DIGEST);
  if (meta.size === 0) return; // written by another tool
  const digest = recorded === undefined ? "" : String(JSON.parse(recorded));
  const head = data.slice(8, start);
  const position = indexOf(head, new TextEncoder().encode(digest));
  if (position >= 0 && digest.length === 64) head.set(new TextEncoder().encode(NO_DIGEST), position);
  if ((await sha256(head, data.subarray(start))) !== digest) {
    throw new CheckpointError(
      `${label}: damaged, the sha256 does not match\n` +
        "hint: load an older checkpoint",
    );
  }
}

function indexOf(data: Uint8Array, part: Uint8Array): number {
  for (let i = data.indexOf(part[0]!); i >= 0; i = data.indexOf(part[0]!, i + 1)) {
    if (part.every((b, j) => data[i + j] === b)) return i;
  }
  return -1;
}

const isObject = (v: unknown): v is Record<string, unknown> =>
  typeof v === "object" && v !== null && !Array.isArray(v);

type Properties = Readonly<Record<string, number | string>>;

/** The state of a training run that checkpoints store besides tensors. */
export interface RunProgress {
  readonly lr: number | undefined;
  readonly step: number;
  readonly seed: number | undefined;
  readonly properties: Properties;
}

/** Parses the progress of a run from the metadata of a checkpoint; throws on invalid values. */
export function readProgress(meta: Meta, label: string): RunProgress {
  const value = <T>(key: string, fits: (v: unknown) => boolean, what: string): T | undefined => {
    const text = meta.get(key);
    if (text === undefined || text === "null") return undefined;
    const parsed: unknown = JSON.parse(text);
    if (!fits(parsed)) throw new CheckpointError(`${label}: the metadata is damaged: '${key}' is ${text.slice(0, 60)}, expected ${what}`);
    return parsed as T;
  };
  const whole = (v: unknown) => Number.isSafeInteger(v) && (v as number) >= 0;
  return {
    lr: value("lr", (v) => typeof v === "number", "a number"),
    step: value<number>("step", whole, "an integer >= 0") ?? 0,
    seed: value("seed", whole, "an integer >= 0"),
    properties: value<Properties>("properties", (v) => typeof v === "object" && !Array.isArray(v), "an object") ?? {},
  };
}

/** Returns the metadata for a run's progress. Values that did not change keep their text in `old`, such as `1.0` for 1. */
export function writeProgress(old: Meta, run: RunProgress & { readonly lr: number }, manifest: string): Meta {
  const text = old.get("properties");
  const before = text ? entries(compact(text)) : new Map<string, string>();
  const properties = Object.entries(run.properties).map(([name, value]) => {
    const known = before.get(name);
    return [name, known !== undefined && JSON.parse(known) === value ? known : write(value)] as const;
  });
  return new Map([
    ...old,
    ["lr", float(run.lr)],
    ["manifest", manifest],
    ["properties", join(new Map(properties))],
    ["seed", String(run.seed)],
    ["step", String(run.step)],
  ]);
}
