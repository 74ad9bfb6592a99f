/** Messages and their metadata. All ids have 64 bits. */
import { addContent, addObject, writeTree, type Content, type Objects, type Tree } from "./objects.js";
import { Fields, Writer, zigzag } from "./wire.js";

export interface Metadata {
  readonly runId: bigint;
  readonly messageId: string;
  readonly from: bigint;
  readonly to: bigint;
  readonly replyTo: string;
  readonly group: string;
  /** Seconds that it is valid. */
  readonly ttl: number;
  /** `train`, `evaluate` or `query`, perhaps with a name behind a dot. */
  readonly type: string;
  /** Seconds since 1970. */
  readonly createdAt: number;
  readonly fromTask?: bigint | undefined;
  readonly toTask?: bigint | undefined;
}

/** What went wrong on this node. */
export interface Failure {
  readonly code: bigint;
  readonly reason: string;
}

/** What Flower calls an exception in a ClientApp. */
export const RAISED = 2n;

export function writeMetadata(m: Metadata): Writer {
  const out = new Writer().uint(1, m.runId).text(2, m.messageId).uint(3, m.from).uint(4, m.to).text(5, m.replyTo);
  out.text(6, m.group).double(7, m.ttl).text(8, m.type).double(9, m.createdAt);
  if (m.fromTask !== undefined) out.setUint(10, m.fromTask);
  if (m.toTask !== undefined) out.setUint(11, m.toTask);
  return out;
}

/** Gives the metadata of a message. */
export function readMetadata(message: Uint8Array): Metadata {
  const f = new Fields(message).inner(1);
  return {
    runId: f.uint(1), messageId: f.text(2), from: f.uint(3), to: f.uint(4), replyTo: f.text(5), group: f.text(6),
    ttl: f.double(7), type: f.text(8), createdAt: f.double(9),
    fromTask: f.has(10) ? f.uint(10) : undefined, toTask: f.has(11) ? f.uint(11) : undefined,
  };
}

export const writeNode = (node: bigint): Writer => new Writer().message(1, new Writer().uint(1, node));

/** A reply that is ready to be pushed. */
export interface Reply {
  readonly id: string;
  readonly runId: bigint;
  /** The body of the call `push-messages`. */
  readonly request: Uint8Array;
  readonly objects: Objects;
}

/** Gives the reply to a message: its content, or what went wrong. */
export async function makeReply(
  node: bigint, asked: Metadata, result: { content: Content } | { failure: Failure }, now: number, seconds: number,
): Promise<Reply> {
  const objects: Objects = new Map();
  const metadata: Metadata = {
    runId: asked.runId, messageId: "", from: asked.to, to: asked.from, replyTo: asked.messageId, group: asked.group,
    ttl: asked.createdAt + asked.ttl - now, type: asked.type, createdAt: now,
    fromTask: asked.toTask, toTask: asked.fromTask,
  };
  const failed = "failure" in result;
  const failure = new Writer();
  if (failed) failure.uint(1, zigzag(result.failure.code)).text(2, result.failure.reason);
  const body = new Writer().message(1, writeMetadata(metadata));
  if (failed) body.message(3, failure);
  const children: Tree[] = failed ? [] : [await addContent(result.content, objects)];
  const tree = await addObject("Message", children, body.done(), objects);
  const message = new Writer().message(1, writeMetadata({ ...metadata, messageId: tree.id }));
  // The content travels as objects; here it has to be there, and empty.
  if (failed) message.message(3, failure);
  else message.message(2, new Writer());
  const request = writeNode(node).message(2, message).message(3, writeTree(tree));
  request.setBytes(4, new Uint8Array(Float64Array.of(seconds).buffer));
  return { id: tree.id, runId: asked.runId, request: request.done(), objects };
}
