/**
 * Content of messages as objects that are known by their digests: `<kind> <children> <size>`, a zero,
 * then the body. Whoever has an object with a digest need not be sent it again.
 */
import type { HostTensor } from "../dtypes.js";
import { concat, sha256 } from "../sha256.js";
import { FlowerError } from "./errors.js";
import { readNpy, writeNpy } from "./npy.js";
import { readValues, writeValues, type Values } from "./records.js";
import { bytesText, Fields, textBytes, Writer } from "./wire.js";

/** The objects of a message, by digest. */
export type Objects = Map<string, Uint8Array>;

/** Which objects a message is made of. */
export interface Tree {
  readonly id: string;
  readonly children: readonly Tree[];
}

/** One record of a message: arrays, numbers or settings. */
export type ContentRecord =
  | { readonly arrays: Readonly<Record<string, HostTensor>> }
  | { readonly metrics: Values }
  | { readonly config: Values };
export type Content = Readonly<Record<string, ContentRecord>>;

/** Arrays are cut into pieces of this size, as Flower cuts them. */
const PIECE = 5 * 1024 * 1024;

/** Puts an object among the others and gives its place in a tree. */
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
  for (let at = 0; at < file.length; at += PIECE) {
    pieces.push(await addObject("ArrayChunk", [], file.subarray(at, at + PIECE), all));
  }
  const ids = [...new Set(pieces.map((p) => p.id))];
  const order = pieces.map((p) => ids.indexOf(p.id)).join(", ");
  const head = `{"dtype": ${asPython(tensor.dtype)}, "shape": [${tensor.dims.join(", ")}], "stype": "numpy.ndarray", "arraychunk_ids": [${order}]}`;
  return await addObject("Array", pieces, textBytes(head), all);
}

/** Puts all records of a message among the objects. */
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

/** Gives a string as Python's JSON has it: only ASCII. */
const asPython = (text: string): string =>
  JSON.stringify(text).replace(/[\u0080-\uffff]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** Gives the records of the message whose object has this digest. */
export function readContent(id: string, all: Objects): Content {
  const message = open(id, all);
  if (message.kind !== "Message") throw new FlowerError(`an object is a ${message.kind} where a Message belongs`);
  const [inner] = message.children;
  if (inner === undefined) return {};
  const named = JSON.parse(bytesText(open(inner, all).body)) as Record<string, string>;
  return Object.fromEntries(Object.entries(named).map(([name, id]) => [name, readRecord(id, all)]));
}

function readRecord(id: string, all: Objects): ContentRecord {
  const { kind, body } = open(id, all);
  if (kind === "MetricRecord") return { metrics: readValues(body) };
  if (kind === "ConfigRecord") return { config: readValues(body) };
  if (kind !== "ArrayRecord") throw new FlowerError(`records of kind ${kind} are not known here`);
  const named = JSON.parse(bytesText(body)) as Record<string, string>;
  return { arrays: Object.fromEntries(Object.entries(named).map(([name, id]) => [name, readArray(id, all)])) };
}

function readArray(id: string, all: Objects): HostTensor {
  const { body, children } = open(id, all);
  const head = JSON.parse(bytesText(body)) as { stype: string; arraychunk_ids: number[] };
  if (head.stype !== "numpy.ndarray") throw new FlowerError(`arrays stored as ${head.stype} are not known here`);
  return readNpy(concat(head.arraychunk_ids.map((i) => open(children[i]!, all).body)));
}

function open(id: string, all: Objects): { kind: string; children: string[]; body: Uint8Array } {
  const content = all.get(id);
  if (!content) throw new FlowerError(`the object ${id} is missing`);
  const zero = content.indexOf(0);
  const [kind = "", children = "", size] = bytesText(content.subarray(0, zero)).split(" ");
  const body = content.subarray(zero + 1);
  if (body.length !== Number(size)) throw new FlowerError(`the object ${id} is cut off`);
  return { kind, children: children ? children.split(",") : [], body };
}

export const writeTree = (tree: Tree): Writer =>
  tree.children.reduce((out, child) => out.message(2, writeTree(child)), new Writer().text(1, tree.id));

export function readTree(data: Uint8Array): Tree {
  const fields = new Fields(data);
  return { id: fields.text(1), children: fields.all(2).map(readTree) };
}

/** Gives all digests of a tree, each once, children first. */
export function digests(tree: Tree, found = new Set<string>()): Set<string> {
  for (const child of tree.children) digests(child, found);
  return found.add(tree.id);
}
