import { createServer, type IncomingMessage, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { addContent, addObject, digests, readContent, readTree, writeTree, type Content, type Objects } from "../src/flower/messages.js";
import { readMetadata, writeMetadata, type Metadata } from "../src/flower/messages.js";
import { Fields, textBytes, Writer } from "../src/flower/wire.js";

/** A reply whose objects have all arrived. */
export interface Arrived {
  readonly metadata: Metadata;
  readonly content: Content;
  readonly failure: string;
}

/** The Fleet API of a SuperLink with one message queue, which records calls and downloads. */
export class FakeSuperLink {
  readonly calls: string[] = [];
  readonly pulled: string[] = [];
  #sent = 0;
  readonly replies: Arrived[] = [];
  readonly nodes = new Map<string, bigint>();
  readonly online = new Set<bigint>();
  /** Calls whose connection is closed without a response, once each. */
  readonly broken: string[] = [];
  /** Offset of the server's clock in seconds. */
  clock = 0;
  readonly #queue: { message: Uint8Array; tree: Uint8Array }[] = [];
  readonly #objects: Objects = new Map();
  #count = 0n;
  #server: Server | undefined;

  async start(): Promise<string> {
    this.#server = createServer((request, response) => {
      void read(request).then((body) => {
        const name = request.url!.replace("/v1/fleet/", "");
        this.calls.push(name);
        const at = this.broken.indexOf(name);
        if (at >= 0) {
          this.broken.splice(at, 1);
          return request.socket.destroy();
        }
        response.setHeader("date", new Date(Date.now() + 1000 * this.clock).toUTCString());
        const [status, answer] = this.#answer(name, new Fields(body), request);
        return response.writeHead(status).end(typeof answer === "number" ? JSON.stringify({ code: answer }) : answer.done());
      });
    });
    await new Promise<void>((resolve) => this.#server!.listen(0, "127.0.0.1", resolve));
    return `http://127.0.0.1:${(this.#server!.address() as AddressInfo).port}`;
  }

  stop(): void {
    this.#server?.closeAllConnections();
    this.#server?.close();
  }

  /** Adds a message for the node to the queue. */
  async send(type: string, content: Content): Promise<void> {
    const [to] = [...this.nodes.values()].slice(-1);
    const metadata: Metadata = {
      runId: 2n ** 63n + 5n, messageId: "", from: 1n, to: to!, replyTo: "", group: "", ttl: 3600, type,
      createdAt: Date.now() / 1000 + ++this.#sent * 1e-6, // unique, with the resolution of Flower's clock: equal messages would have equal ids
    };
    const body = new Writer().message(1, writeMetadata(metadata)).done();
    const tree = await addObject("Message", [await addContent(content, this.#objects)], body, this.#objects);
    const message = new Writer().message(1, writeMetadata({ ...metadata, messageId: tree.id })).message(2, new Writer());
    this.#queue.push({ message: message.done(), tree: writeTree(tree).done() });
  }

  #answer(name: string, fields: Fields, request: IncomingMessage): [number, Writer | number] {
    const key = request.headers["flwr-public-key"] as string;
    const age = (Date.now() + 1000 * this.clock - Date.parse(request.headers["flwr-timestamp"] as string)) / 1000;
    if (!key || age < -5 || age > 305) return [401, 0];
    const out = new Writer();
    if (name === "register-node") {
      if (this.nodes.has(key)) return [412, 23];
      this.nodes.set(key, ++this.#count + 2n ** 63n);
      return [200, out.uint(1, this.nodes.get(key)!)];
    }
    const id = this.nodes.get(key);
    if (id === undefined) return [401, 0];
    if (name === "activate-node") {
      if (this.online.has(id)) return [412, 2004];
      this.online.add(id);
      return [200, out.uint(1, id)];
    }
    if (name === "deactivate-node") this.online.delete(id);
    else if (fields.inner(1).uint(1) !== id) return [401, 0];
    if (name === "send-node-heartbeat") out.uint(1, 1n);
    if (name === "pull-messages") {
      const next = this.#queue.shift();
      if (next) out.setBytes(2, next.message).setBytes(3, next.tree);
    }
    if (name === "pull-object") {
      this.pulled.push(fields.text(3));
      const data = this.#objects.get(fields.text(3));
      if (data) out.uint(1, 1n).uint(2, 1n).bytes(3, data);
    }
    if (name === "push-messages") this.#take(fields, out);
    if (name === "push-object") {
      this.#objects.set(fields.text(3), fields.bytes(4).slice());
      this.#wanted.delete(fields.text(3));
      if (!this.#wanted.size) this.#arrived();
      out.uint(1, 1n);
    }
    return [200, out];
  }

  #wanted = new Set<string>();
  #push: { message: Uint8Array; tree: string } | undefined;

  #take(fields: Fields, out: Writer): void {
    const [message] = fields.all(2);
    const tree = readTree(fields.all(3)[0]!);
    const { replyTo } = readMetadata(message!);
    if (this.replies.some((r) => r.metadata.replyTo === replyTo)) return;
    this.#push = { message: message!.slice(), tree: tree.id };
    this.#wanted = new Set([...digests(tree)].filter((id) => !this.#objects.has(id)));
    for (const id of this.#wanted) out.setBytes(3, textBytes(id));
    out.text(4, "session");
  }

  #arrived(): void {
    const { message, tree } = this.#push!;
    const failure = new Fields(message).inner(3).text(2);
    this.replies.push({ metadata: readMetadata(message), content: readContent(tree, this.#objects), failure });
  }
}

async function read(request: IncomingMessage): Promise<Uint8Array> {
  const parts: Uint8Array[] = [];
  for await (const part of request) parts.push(part as Uint8Array);
  return new Uint8Array(Buffer.concat(parts));
}

