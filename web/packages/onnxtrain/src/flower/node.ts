/** A Flower node (SuperNode) that trains artifacts in Node or in a page. */
import { FleetConnection, newKey, sleep, type Traffic } from "./connection.js";
import { LocalRound, type RoundSettings } from "./local-round.js";
import {
  type Content, digests, makeReply, type Metadata, type Objects, CLIENT_APP_RAISED, readContent, readMetadata, readTree, type
  Reply, type Tree, type Values, writeNode,
} from "./messages.js";
import { databaseNodeStore, type Identity, memoryNodeStore, type NodeStore, readIdentity, writeIdentity } from "./node-store.js";
import { bytesText, FlowerError, Writer } from "./wire.js";
import type { Dataset } from "../data.js";
import { inNode } from "../runtime.js";
import { sha256 } from "../sha256.js";
import type { Trainer } from "../trainer.js";

/** The result of one message. */
export interface RoundReport {
  readonly type: string;
  readonly round: number;
  readonly metrics: Values;
  readonly seconds: number;
}

export interface FlowerNodeOptions extends RoundSettings {
  readonly trainer: Trainer;
  /** Columns, or a function that returns the batches of an epoch. */
  readonly dataset: Dataset;
  /** Evaluation data. Default: the dataset. */
  readonly validation?: Dataset;
  /** The node's P-384 key pair. Default: a new one, which is stored. */
  readonly key?: CryptoKeyPair;
  /** Storage for key, id and unfinished work. Default: IndexedDB in pages, memory in Node. */
  readonly store?: NodeStore;
  /** Whether to register the key. Set to `false` if the SuperLink only accepts keys that were registered before. */
  readonly register?: boolean;
  /** Do not request messages while the page is hidden. */
  readonly pauseWhenHidden?: boolean;
  /** Heartbeat interval in seconds. The SuperLink considers the node offline after two intervals without a heartbeat. */
  readonly heartbeat?: number;
  /** Milliseconds between requests for messages. */
  readonly poll?: number;
  readonly onRound?: (report: RoundReport) => void;
  readonly onMessage?: (message: string) => void;
}

/** Flower's error codes. */
const KEY_IN_USE = 23;
const NO_REGISTRATION = [2001, 2002];
const STILL_ONLINE = 2004;
/** Attempts of the first calls: a page cannot distinguish an unreachable server from one that rejects its origin. */
const FIRST_TRIES = 6;

export class FlowerNode {
  /** Resolves when the node has left; rejects if it failed. */
  done: Promise<void> = Promise.resolve();
  readonly #url: string;
  readonly #options: FlowerNodeOptions;
  readonly #store: NodeStore;
  readonly #round: LocalRound;
  readonly #stop = new AbortController();
  #connection: FleetConnection | undefined;
  #id: bigint | undefined;
  /** Objects of the last message, reused because the next one often has the same weights. */
  #last: Objects = new Map();

  constructor(url: string, options: FlowerNodeOptions) {
    this.#url = url;
    this.#options = options;
    this.#store = options.store ?? (inNode() ? memoryNodeStore() : databaseNodeStore());
    this.#round = new LocalRound(options.trainer, options.dataset, options.validation, options);
  }

  /** The id that the SuperLink assigned to this node. */
  get id(): bigint | undefined {
    return this.#id;
  }

  /** Bytes and calls since `join`. */
  get traffic(): Traffic {
    return this.#connection?.traffic ?? { sent: 0, received: 0, calls: {} };
  }

  /** Joins the federation and participates until `leave`. */
  async join(): Promise<this> {
    const known = await readIdentity(this.#store, this.#name("identity"));
    const key = this.#options.key ?? known?.key ?? (await newKey(this.#store.text));
    // An id belongs to its key.
    if (known && !this.#options.key) this.#id = known.id;
    this.#connection = new FleetConnection(this.#url, key, this.#stop.signal, (m) => this.#notify(m));
    await this.#activate({ key, id: this.#id });
    const state = (await this.#store.get(this.#name("state"))) as Uint8Array | undefined;
    if (state) await this.#round.restore(state);
    this.done = Promise.all([this.#sendHeartbeats(), this.#processMessages()]).then(() => undefined);
    this.done.catch(() => undefined); // avoid an unhandled rejection; awaiting `done` still throws
    return this;
  }

  /** Leaves the federation, which then does not wait for this node. The node may join again with its key. */
  async leave(): Promise<void> {
    this.#stop.abort();
    await this.done.catch(() => undefined);
    if (this.#id === undefined) return;
    const body = new Writer().uint(1, this.#id).done();
    await this.#connection!.call("deactivate-node", body, { timeout: 5000, tries: 1 }).catch((e: Error) => this.#notify(e.message));
  }

  async #activate({ key }: Identity): Promise<void> {
    const connection = this.#connection!;
    const publicKey = await connection.prepare();
    if (this.#options.register !== false) {
      await connection.call("register-node", new Writer().setBytes(1, publicKey).done(), { tries: FIRST_TRIES }).catch((error: FlowerError) => {
        if (error.code !== KEY_IN_USE && !NO_REGISTRATION.includes(error.code)) throw error;
      });
    }
    const body = new Writer().setBytes(1, publicKey).setDouble(2, this.#heartbeat()).done();
    try {
      this.#id = (await connection.call("activate-node", body, { tries: FIRST_TRIES })).uint(1);
    } catch (error) {
      // The node is still online from before a reload: continue with its old id.
      if ((error as FlowerError).code !== STILL_ONLINE || this.#id === undefined) throw error;
      await this.#sendHeartbeat();
    }
    await writeIdentity(this.#store, this.#name("identity"), { key, id: this.#id });
    this.#notify(`joined as node ${this.#id}`);
  }

  async #sendHeartbeat(): Promise<void> {
    const body = this.#node().setDouble(2, this.#heartbeat()).done();
    const answer = await this.#connection!.call("send-node-heartbeat", body, { timeout: 10_000 });
    if (answer.uint(1) !== 1n) throw new FlowerError("unknown to the SuperLink", 401);
  }

  async #sendHeartbeats(): Promise<void> {
    const { signal } = this.#stop;
    for (;;) {
      await sleep((this.#heartbeat() - 5) * 1000 * (0.7 + 0.2 * Math.random()), signal);
      if (signal.aborted) return;
      await this.#sendHeartbeat().catch((error: Error) => this.#notify(error.message));
    }
  }

  async #processMessages(): Promise<void> {
    const { signal } = this.#stop;
    let rejected = 0;
    while (!signal.aborted) {
      try {
        await this.#visible();
        const busy = (await this.#resume()) || (await this.#next());
        rejected = 0;
        if (!busy) await sleep(this.#options.poll ?? 3000, signal);
      } catch (error) {
        if (signal.aborted) return;
        this.#notify((error as Error).message);
        const { status } = error as FlowerError;
        // A SuperLink that was restarted without its database does not know any node: register again.
        if (status === 401 && ++rejected > 3) throw error;
        if (status === 401) await this.#rejoin();
        else await this.#discardPending();
        await sleep(this.#options.poll ?? 3000, signal);
      }
    }
  }

  async #rejoin(): Promise<void> {
    await this.#discardPending();
    const known = await readIdentity(this.#store, this.#name("identity"));
    await this.#activate({ key: this.#options.key ?? known!.key, id: undefined });
  }

  /** Finishes the message from before a reload; returns whether there was one. */
  async #resume(): Promise<boolean> {
    const reply = (await this.#store.get(this.#name("reply"))) as (Reply & { message: Metadata }) | undefined;
    if (reply) {
      await this.#push(reply.message, reply);
      return true;
    }
    const pending = (await this.#store.get(this.#name("pending"))) as { message: Uint8Array; tree: Uint8Array } | undefined;
    if (!pending) return false;
    await this.#handle(readMetadata(pending.message), readTree(pending.tree));
    return true;
  }

  /** Requests a message and replies to it; returns whether there was one. */
  async #next(): Promise<boolean> {
    const answer = await this.#connection!.call("pull-messages", this.#node().done());
    const [message] = answer.all(2);
    const [tree] = answer.all(3);
    if (!message || !tree) return false;
    // A message is delivered once: store it before anything else.
    await this.#store.put(this.#name("pending"), { message: message.slice(), tree: tree.slice() });
    await this.#handle(readMetadata(message), readTree(tree));
    return true;
  }

  async #handle(message: Metadata, tree: Tree): Promise<void> {
    const content = readContent(tree.id, (this.#last = await this.#pull(message, tree)));
    const start = performance.now();
    const result = await this.#round.answer(message.type, content, this.#stop.signal).then(
      (reply) => ({ content: reply }),
      (error: Error) => ({ failure: { code: CLIENT_APP_RAISED, reason: `${error.name}: ${error.message}` } }),
    );
    this.#stop.signal.throwIfAborted(); // the stored message is processed again after the next join
    const seconds = (performance.now() - start) / 1000;
    const reply = await makeReply(this.#id!, message, result, this.#connection!.now(), seconds);
    await this.#store.put(this.#name("reply"), { ...reply, message });
    if ("failure" in result) this.#notify(result.failure.reason);
    else this.#report(message, content, result.content, seconds);
    await this.#push(message, reply);
    const state = await this.#round.state();
    if (state && message.type.startsWith("train")) await this.#store.put(this.#name("state"), state);
  }

  /** Returns the objects of a message; downloads only those that the last message did not have. */
  async #pull(message: Metadata, tree: Tree): Promise<Objects> {
    const objects: Objects = new Map();
    for (const id of digests(tree)) {
      const same = this.#last.get(id);
      if (same) {
        objects.set(id, same);
        continue;
      }
      for (let wait = 1000; !objects.has(id); wait = Math.min(wait * 2, 10_000)) {
        const answer = await this.#connection!.call("pull-object", this.#inRun(message.runId).text(3, id).done(), { timeout: 120_000 });
        if (!answer.uint(1)) throw new FlowerError(`the SuperLink has no object ${id}`);
        if (answer.uint(2)) {
          const data = answer.bytes(3);
          if ((await sha256(data)) !== id) throw new FlowerError(`the object ${id} is damaged: sha256 does not match`);
          objects.set(id, data);
        } else await sleep(wait, this.#stop.signal); // not uploaded completely yet
        this.#stop.signal.throwIfAborted();
      }
    }
    return objects;
  }

  async #push(message: Metadata, reply: Reply): Promise<void> {
    const connection = this.#connection!;
    // The reply is stored locally, so the server may delete the message.
    await connection.call("confirm-message-received", this.#inRun(message.runId).text(3, message.messageId).done());
    const answer = await connection.call("push-messages", reply.request);
    const wanted = answer.all(3).map(bytesText);
    // A rejected reply looks like success without requested objects.
    if (!wanted.length) this.#notify("the SuperLink rejected the reply: it was late or a duplicate");
    for (const id of wanted) {
      const data = reply.objects.get(id);
      if (!data) throw new FlowerError(`the SuperLink requested the object ${id}, which is not part of the reply`);
      const body = this.#inRun(reply.runId).text(3, id).bytes(4, data).text(5, answer.text(4)).done();
      const stored = await connection.call("push-object", body, { timeout: 120_000 });
      if (!stored.uint(1)) throw new FlowerError(`the SuperLink did not store the object ${id}`);
    }
    await this.#discardPending();
  }

  /** Deletes the stored message and reply. */
  async #discardPending(): Promise<void> {
    for (const name of ["reply", "pending"]) await this.#store.remove(this.#name(name));
  }

  #report(message: Metadata, content: Content, reply: Content, seconds: number): void {
    const config = content["config"];
    const metrics = reply["metrics"];
    const round = config && "config" in config ? Number(config.config["server-round"] ?? 0) : 0;
    this.#options.onRound?.({ type: message.type, round, metrics: metrics && "metrics" in metrics ? metrics.metrics : {}, seconds });
  }

  async #visible(): Promise<void> {
    const page = globalThis.document as Document | undefined;
    while (this.#options.pauseWhenHidden && page?.hidden && !this.#stop.signal.aborted) await sleep(1000, this.#stop.signal);
  }

  #heartbeat(): number {
    // Browsers throttle timers of hidden pages to one per minute.
    return this.#options.heartbeat ?? (inNode() ? 30 : 120);
  }

  #node(): Writer {
    return writeNode(this.#id!);
  }

  #inRun(run: bigint): Writer {
    return this.#node().uint(2, run);
  }

  #name(what: string): string {
    return `${this.#url}/${what}`;
  }

  #notify(message: string): void {
    this.#options.onMessage?.(message);
  }
}
