/** One round on a node: load the global weights, train on local data, return the result. */
import type { Content, Values } from "./messages.js";
import { FlowerError } from "./wire.js";
import { readCheckpoint, stateKey, writeCheckpoint } from "../checkpoint.js";
import { countRows, type Dataset } from "../data.js";
import type { HostTensor } from "../dtypes.js";
import { ofRole, type TensorSpec } from "../manifest.js";
import type { Trainer } from "../trainer.js";

/** Training options of a node; missing ones are set by the server. */
export interface RoundSettings {
  readonly epochs?: number | undefined;
  readonly batchSize?: number | undefined;
  readonly learningRate?: number | undefined;
  readonly shuffle?: boolean | undefined;
  readonly seed?: number | undefined;
  /** Whether the optimizer state is reset at the start of each round. Default: `reset`. */
  readonly optimizerState?: "reset" | "keep" | undefined;
}

/** The state slot with the global parameters for FedProx's proximal term. */
const ANCHOR = "anchor";
const SEEDS = 2 ** 24;

type Arrays = Readonly<Record<string, HostTensor>>;

export class LocalRound {
  readonly #trainer: Trainer;
  readonly #data: Dataset;
  readonly #validation: Dataset;
  readonly #own: RoundSettings;
  readonly #rate: number;
  #start: Uint8Array | undefined;
  /** Whether the node keeps state between rounds. */
  #stateful = false;

  constructor(trainer: Trainer, data: Dataset, validation: Dataset | undefined, own: RoundSettings) {
    this.#trainer = trainer;
    this.#data = data;
    this.#validation = validation ?? data;
    this.#own = own;
    this.#rate = trainer.learningRate;
  }

  /** Executes a message and returns the content of the reply. */
  async answer(type: string, content: Content, signal: AbortSignal): Promise<Content> {
    this.#start ??= await this.#trainer.exportCheckpoint();
    const kind = type.split(".")[0];
    if (kind === "query") return { answer: { config: { parameters: this.#trainer.parameters.map((p) => p.name) } } };
    const arrays = content["arrays"];
    if (!arrays || !("arrays" in arrays)) throw new FlowerError("the message has no arrays record");
    this.#check(arrays.arrays);
    const config = content["config"];
    const serverConfig = config && "config" in config ? config.config : {};
    if (kind === "train") return await this.#train(arrays.arrays, serverConfig, signal);
    if (kind === "evaluate") return await this.#evaluate(arrays.arrays, signal);
    throw new FlowerError(`unknown message type: ${type}`);
  }

  /** Returns the state that the node keeps between rounds, if there is any. */
  async state(): Promise<Uint8Array | undefined> {
    return this.#stateful ? await this.#trainer.exportCheckpoint() : undefined;
  }

  /** Restores the result of `state` after a reload. */
  async restore(state: Uint8Array): Promise<void> {
    this.#start ??= await this.#trainer.exportCheckpoint();
    await this.#trainer.importCheckpoint(state, "the saved state of this node");
  }

  #check(arrays: Arrays): void {
    const { parameters, buffers } = this.#trainer.manifest;
    const known = new Map([...parameters, ...buffers].map((w) => [w.name, w]));
    const odd = [
      ...parameters.filter((p) => !(p.name in arrays)).map((p) => `'${p.name}' is missing`),
      ...Object.keys(arrays).filter((name) => !known.has(name)).map((name) => `'${name}' is unknown`),
    ];
    if (odd.length) {
      throw new FlowerError(
        `the server's parameters do not match these artifacts: ${odd.join("; ")}\n` +
          "hint: use artifacts of the same build on the server and all clients",
      );
    }
  }

  async #train(arrays: Arrays, serverConfig: Values, signal: AbortSignal): Promise<Content> {
    const trainer = this.#trainer;
    const settings = this.#settings(serverConfig);
    const round = Number(serverConfig["server-round"] ?? 0);
    const seed = (settings.seed * 1009 + round) % SEEDS;
    const keep = settings.optimizerState === "keep";
    this.#stateful = keep || trainer.manifest.buffers.some((b) => !(b.name in arrays));
    await this.#load(arrays, keep, seed);
    trainer.learningRate = settings.learningRate;
    const first = trainer.globalStep;
    const names = this.#metricNames();
    let sums = new Map<string, number>();
    let steps = 0;
    let epoch = 0;
    for await (const step of trainer.fit(this.#data, { ...settings, seed, signal })) {
      if (step.epoch !== epoch) [sums, steps, epoch] = [new Map(), 0, step.epoch];
      for (const name of names) sums.set(name, (sums.get(name) ?? 0) + step[name]!);
      steps++;
    }
    const trained: Record<string, HostTensor> = {};
    for (const name of Object.keys(arrays)) trained[name] = await trainer.getParameter(name);
    const metrics = {
      "num-examples": BigInt(await countRows(this.#data, this.#specs())),
      ...Object.fromEntries([...sums].map(([name, sum]) => [name, sum / steps])),
      steps: BigInt(trainer.globalStep - first),
    };
    return { arrays: { arrays: trained }, metrics: { metrics } };
  }

  async #evaluate(arrays: Arrays, signal: AbortSignal): Promise<Content> {
    for (const [name, tensor] of Object.entries(arrays)) await this.#trainer.setParameter(name, tensor);
    const metrics = await this.#trainer.evaluate(this.#validation, { signal });
    const rows = BigInt(await countRows(this.#validation, this.#specs()));
    return { metrics: { metrics: { "num-examples": rows, ...metrics } } };
  }

  #settings(serverConfig: Values): Required<{ [K in keyof RoundSettings]: NonNullable<RoundSettings[K]> }> {
    const mu = Number(serverConfig["proximal-mu"] ?? this.#proximal());
    if (mu !== this.#proximal()) {
      throw new FlowerError(`the server sets proximal-mu to ${mu}, but these artifacts were built with ${this.#proximal()}`);
    }
    const own = this.#own;
    const number = (name: string, fallback: number) => Number(serverConfig[name] ?? fallback);
    const state = own.optimizerState ?? serverConfig["optimizer-state"] ?? "reset";
    if (state !== "reset" && state !== "keep") throw new FlowerError(`unknown optimizer-state: '${String(state)}' (expected reset or keep)`);
    return {
      epochs: own.epochs ?? number("epochs", 1),
      batchSize: own.batchSize ?? number("batch-size", 32),
      learningRate: own.learningRate ?? number("lr", this.#rate),
      shuffle: own.shuffle ?? ((serverConfig["shuffle"] ?? true) as boolean),
      seed: own.seed ?? number("seed", 0),
      optimizerState: state,
    };
  }

  #proximal(): number {
    return Number((this.#trainer.manifest.optimizer as { proximal?: number }).proximal ?? 0);
  }

  /** Loads the global weights; optimizer state and buffers come from the first checkpoint or from the last round. */
  async #load(arrays: Arrays, keep: boolean, seed: number): Promise<void> {
    const trainer = this.#trainer;
    const { tensors, meta } = await readCheckpoint(keep ? await trainer.exportCheckpoint() : this.#start!);
    const all = new Map(tensors);
    // Running statistics that the server does not aggregate stay local.
    for (const { name } of trainer.manifest.buffers) all.set(name, arrays[name] ?? (await trainer.getParameter(name)));
    for (const [name, tensor] of Object.entries(arrays)) all.set(name, tensor);
    for (const { parameter, slot } of trainer.manifest.state) {
      if (slot === ANCHOR) all.set(stateKey(parameter, slot), arrays[parameter]!);
    }
    await trainer.importCheckpoint(await writeCheckpoint(all, new Map([...meta, ["seed", String(seed)]])), "the global weights");
  }

  #specs(): TensorSpec[] {
    return ofRole(this.#evalModel().inputs, "input", "target");
  }

  #metricNames(): string[] {
    return ["loss", ...ofRole(this.#evalModel().outputs, "metric").map((t) => t.name)];
  }

  #evalModel() {
    const spec = this.#trainer.manifest.models.find((m) => m.role === "eval");
    if (!spec) throw new FlowerError("these artifacts have no eval model\nhint: build them again");
    return spec;
  }
}
