/** A node of a Flower federation that trains artifacts: in Node, or in a page. */
import type { Dataset } from "../data.js";
import { sha256 } from "../sha256.js";
import { inNode } from "../runtime.js";
import type { Trainer } from "../trainer.js";
import { FlowerError } from "./errors.js";
import { newKey } from "./keys.js";
import { Link, sleep, type Traffic } from "./link.js";
import { LocalRound, type RoundSettings } from "./local-round.js";
import { makeReply, RAISED, readMetadata, writeNode, type Metadata, type Reply } from "./messages.js";
import { databaseNodeStore, memoryNodeStore, readIdentity, writeIdentity, type Identity, type NodeStore } from "./node-store.js";
import { digests, readContent, readTree, type Content, type Objects, type Tree } from "./objects.js";
import type { Values } from "./records.js";
import { bytesText, Writer } from "./wire.js";

/** What this node has done for a message. */
export interface RoundReport {
  readonly type: string;
  readonly round: number;
  readonly metrics: Values;
  readonly seconds: number;
}

export interface FlowerNodeOptions extends RoundSettings {
  readonly trainer: Trainer;
  /** Columns, or a function that starts the batches anew. */
  readonly dataset: Dataset;
  /** Data to evaluate on; else the dataset. */
  readonly validation?: Dataset;
  /** A P-384 key pair that the federation knows; else one is made and kept. */
  readonly key?: CryptoKeyPair;
  /** Where key, id and unfinished work stay: IndexedDB in pages, memory in Node unless this is given. */
  readonly store?: NodeStore;
  /** `false` where only keys that were registered before are let in. */
  readonly register?: boolean;
  /** Ask for no work while the page is hidden. */
  readonly pauseWhenHidden?: boolean;
  /** Seconds: after twice as long without a sign of life the federation goes on without this node. */
  readonly heartbeat?: number;
  /** Milliseconds between questions for work. */
  readonly poll?: number;
  readonly onRound?: (report: RoundReport) => void;
  readonly onMessage?: (message: string) => void;
}

/** Flower's numbers of errors. */
const KEY_IN_USE = 23;
const NO_REGISTRATION = [2001, 2002];
const STILL_ONLINE = 2004;
/** How often the first call is tried: a page cannot tell a server that is away from one that refuses its origin. */
const FIRST_TRIES = 6;

export class FlowerNode {
  /** Ends when the node has left, or could not go on. */
  done: Promise<void> = Promise.resolve();
  readonly #url: string;
  readonly #options: FlowerNodeOptions;
  readonly #store: NodeStore;
  readonly #round: LocalRound;
  readonly #stop = new AbortController();
  #link: Link | undefined;
  #id: bigint | undefined;
  /** Objects of the last message: the next one often has the same weights. */
  #last: Objects = new Map();

  constructor(url: string, options: FlowerNodeOptions) {
    this.#url = url;
    this.#options = options;
    this.#store = options.store ?? (inNode() ? memoryNodeStore() : databaseNodeStore());
    this.#round = new LocalRound(options.trainer, options.dataset, options.validation, options);
  }

  /** The number that the federation gave this node. */
  get id(): bigint | undefined {
    return this.#id;
  }

  /** Bytes and calls so far. */
  get traffic(): Traffic {
    return this.#link?.traffic ?? { sent: 0, received: 0, calls: {} };
  }

  /** Joins the federation, and takes part until `leave`. */
  async join(): Promise<this> {
    const known = await readIdentity(this.#store, this.#name("identity"));
    const key = this.#options.key ?? known?.key ?? (await newKey(this.#store.text));
    // A number belongs to its key.
    if (known && !this.#options.key) this.#id = known.id;
    this.#link = new Link(this.#url, key, this.#stop.signal, (m) => this.#tell(m));
    await this.#enter({ key, id: this.#id });
    const kept = (await this.#store.get(this.#name("kept"))) as Uint8Array | undefined;
    if (kept) await this.#round.restore(kept);
    this.done = Promise.all([this.#beat(), this.#work()]).then(() => undefined);
    this.done.catch(() => undefined); // whoever awaits it sees the error
    return this;
  }

  /** Leaves; the federation need not wait for this node then. It may join again with its key. */
  async leave(): Promise<void> {
    this.#stop.abort();
    await this.done.catch(() => undefined);
    if (this.#id === undefined) return;
    const body = new Writer().uint(1, this.#id).done();
    await this.#link!.call("deactivate-node", body, { timeout: 5000, tries: 1 }).catch((e: Error) => this.#tell(e.message));
  }

  async #enter({ key }: Identity): Promise<void> {
    const link = this.#link!;
    const publicKey = await link.prepare();
    if (this.#options.register !== false) {
      await link.call("register-node", new Writer().setBytes(1, publicKey).done(), { tries: FIRST_TRIES }).catch((error: FlowerError) => {
        if (error.code !== KEY_IN_USE && !NO_REGISTRATION.includes(error.code)) throw error;
      });
    }
    const body = new Writer().setBytes(1, publicKey).setDouble(2, this.#heartbeat()).done();
    try {
      this.#id = (await link.call("activate-node", body, { tries: FIRST_TRIES })).uint(1);
    } catch (error) {
      // Still online from before a reload: a sign of life under the number from then is enough.
      if ((error as FlowerError).code !== STILL_ONLINE || this.#id === undefined) throw error;
      await this.#alive();
    }
    await writeIdentity(this.#store, this.#name("identity"), { key, id: this.#id });
    this.#tell(`joined as node ${this.#id}`);
  }

  async #alive(): Promise<void> {
    const body = this.#node().setDouble(2, this.#heartbeat()).done();
    const answer = await this.#link!.call("send-node-heartbeat", body, { timeout: 10_000 });
    if (answer.uint(1) !== 1n) throw new FlowerError("the SuperLink does not know this node", 401);
  }

  async #beat(): Promise<void> {
    const { signal } = this.#stop;
    for (;;) {
      await sleep((this.#heartbeat() - 5) * 1000 * (0.7 + 0.2 * Math.random()), signal);
      if (signal.aborted) return;
      await this.#alive().catch((error: Error) => this.#tell(error.message));
    }
  }

  async #work(): Promise<void> {
    const { signal } = this.#stop;
    let refused = 0;
    while (!signal.aborted) {
      try {
        await this.#visible();
        const busy = (await this.#resume()) || (await this.#next());
        refused = 0;
        if (!busy) await sleep(this.#options.poll ?? 3000, signal);
      } catch (error) {
        if (signal.aborted) return;
        this.#tell((error as Error).message);
        const { status } = error as FlowerError;
        // A SuperLink that was started anew without its database knows nobody.
        if (status === 401 && ++refused > 3) throw error;
        if (status === 401) await this.#again();
        else await this.#forget();
        await sleep(this.#options.poll ?? 3000, signal);
      }
    }
  }

  async #again(): Promise<void> {
    await this.#forget();
    const known = await readIdentity(this.#store, this.#name("identity"));
    await this.#enter({ key: this.#options.key ?? known!.key, id: undefined });
  }

  /** Finishes what was begun before a reload; tells whether there was something. */
  async #resume(): Promise<boolean> {
    const reply = (await this.#store.get(this.#name("reply"))) as (Reply & { asked: Metadata }) | undefined;
    if (reply) {
      await this.#push(reply.asked, reply);
      return true;
    }
    const pending = (await this.#store.get(this.#name("pending"))) as { message: Uint8Array; tree: Uint8Array } | undefined;
    if (!pending) return false;
    await this.#handle(readMetadata(pending.message), readTree(pending.tree));
    return true;
  }

  /** Asks for a message and answers it; tells whether there was one. */
  async #next(): Promise<boolean> {
    const answer = await this.#link!.call("pull-messages", this.#node().done());
    const [message] = answer.all(2);
    const [tree] = answer.all(3);
    if (!message || !tree) return false;
    // It is given out once: stored before anything else is done with it.
    await this.#store.put(this.#name("pending"), { message: message.slice(), tree: tree.slice() });
    await this.#handle(readMetadata(message), readTree(tree));
    return true;
  }

  async #handle(asked: Metadata, tree: Tree): Promise<void> {
    const content = readContent(tree.id, (this.#last = await this.#pull(asked, tree)));
    const start = performance.now();
    const result = await this.#round.answer(asked.type, content, this.#stop.signal).then(
      (found) => ({ content: found }),
      (error: Error) => ({ failure: { code: RAISED, reason: `${error.name}: ${error.message}` } }),
    );
    this.#stop.signal.throwIfAborted(); // what is unfinished is begun again after the next join
    const seconds = (performance.now() - start) / 1000;
    const reply = await makeReply(this.#id!, asked, result, this.#link!.now(), seconds);
    await this.#store.put(this.#name("reply"), { ...reply, asked });
    if ("failure" in result) this.#tell(result.failure.reason);
    else this.#report(asked, content, result.content, seconds);
    await this.#push(asked, reply);
    const kept = await this.#round.kept();
    if (kept && asked.type.startsWith("train")) await this.#store.put(this.#name("kept"), kept);
  }

  /** Gives the objects of a message; those of the last one are not asked for again. */
  async #pull(asked: Metadata, tree: Tree): Promise<Objects> {
    const found: Objects = new Map();
    for (const id of digests(tree)) {
      const same = this.#last.get(id);
      if (same) {
        found.set(id, same);
        continue;
      }
      for (let wait = 1000; !found.has(id); wait = Math.min(wait * 2, 10_000)) {
        const answer = await this.#link!.call("pull-object", this.#inRun(asked.runId).text(3, id).done(), { timeout: 120_000 });
        if (!answer.uint(1)) throw new FlowerError(`the SuperLink has no object ${id}`);
        if (answer.uint(2)) {
          const data = answer.bytes(3);
          if ((await sha256(data)) !== id) throw new FlowerError(`the object ${id} came damaged`);
          found.set(id, data);
        } else await sleep(wait, this.#stop.signal); // its sender is still at it
        this.#stop.signal.throwIfAborted();
      }
    }
    return found;
  }

  async #push(asked: Metadata, reply: Reply): Promise<void> {
    const link = this.#link!;
    // The reply is stored: the server may forget what it sent.
    await link.call("confirm-message-received", this.#inRun(asked.runId).text(3, asked.messageId).done());
    const answer = await link.call("push-messages", reply.request);
    const wanted = answer.all(3).map(bytesText);
    // A refusal looks like a success that wants nothing.
    if (!wanted.length) this.#tell("the SuperLink did not take the reply: it came too late, or twice");
    for (const id of wanted) {
      const data = reply.objects.get(id);
      if (!data) throw new FlowerError(`the SuperLink asks for an object ${id} that is not part of the reply`);
      const body = this.#inRun(reply.runId).text(3, id).bytes(4, data).text(5, answer.text(4)).done();
      const stored = await link.call("push-object", body, { timeout: 120_000 });
      if (!stored.uint(1)) throw new FlowerError(`the SuperLink did not store the object ${id}`);
    }
    await this.#forget();
  }

  /** Lets go of the message in hand. */
  async #forget(): Promise<void> {
    for (const name of ["reply", "pending"]) await this.#store.remove(this.#name(name));
  }

  #report(asked: Metadata, content: Content, reply: Content, seconds: number): void {
    const config = content["config"];
    const metrics = reply["metrics"];
    const round = config && "config" in config ? Number(config.config["server-round"] ?? 0) : 0;
    this.#options.onRound?.({ type: asked.type, round, metrics: metrics && "metrics" in metrics ? metrics.metrics : {}, seconds });
  }

  async #visible(): Promise<void> {
    const page = globalThis.document as Document | undefined;
    while (this.#options.pauseWhenHidden && page?.hidden && !this.#stop.signal.aborted) await sleep(1000, this.#stop.signal);
  }

  #heartbeat(): number {
    // Hidden pages have timers of a minute.
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

  #tell(message: string): void {
    this.#options.onMessage?.(message);
  }
}
