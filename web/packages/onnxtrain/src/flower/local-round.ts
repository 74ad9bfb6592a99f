/** A node's part of a round: take the global weights, train on its data, and tell. */
import { countRows, type Dataset } from "../data.js";
import type { HostTensor } from "../dtypes.js";
import { ofRole, type TensorSpec } from "../manifest.js";
import { readCheckpoint, stateKey, writeCheckpoint } from "../safetensors.js";
import type { Trainer } from "../trainer.js";
import { FlowerError } from "./errors.js";
import type { Content } from "./objects.js";
import type { Values } from "./records.js";

/** How a node trains; what is left out is for the server to say. */
export interface RoundSettings {
  readonly epochs?: number | undefined;
  readonly batchSize?: number | undefined;
  readonly learningRate?: number | undefined;
  readonly shuffle?: boolean | undefined;
  readonly seed?: number | undefined;
  /** Whether the optimizer starts each round anew. */
  readonly optimizerState?: "reset" | "keep" | undefined;
}

/** The slot that the proximal term of FedProx draws parameters to. */
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
  /** Whether the last round left something that the next one needs. */
  #stays = false;

  constructor(trainer: Trainer, data: Dataset, validation: Dataset | undefined, own: RoundSettings) {
    this.#trainer = trainer;
    this.#data = data;
    this.#validation = validation ?? data;
    this.#own = own;
    this.#rate = trainer.learningRate;
  }

  /** Does what a message asks for. */
  async answer(type: string, content: Content, signal: AbortSignal): Promise<Content> {
    this.#start ??= await this.#trainer.exportCheckpoint();
    const kind = type.split(".")[0];
    if (kind === "query") return { answer: { config: { parameters: this.#trainer.parameters.map((p) => p.name) } } };
    const arrays = content["arrays"];
    if (!arrays || !("arrays" in arrays)) throw new FlowerError("the message has no arrays");
    this.#check(arrays.arrays);
    const config = content["config"];
    const told = config && "config" in config ? config.config : {};
    if (kind === "train") return await this.#train(arrays.arrays, told, signal);
    if (kind === "evaluate") return await this.#evaluate(arrays.arrays, signal);
    throw new FlowerError(`messages of type ${type} are not known here`);
  }

  /** Gives everything that stays with this node between rounds, if something does. */
  async kept(): Promise<Uint8Array | undefined> {
    return this.#stays ? await this.#trainer.exportCheckpoint() : undefined;
  }

  /** Goes on from what `kept` gave before a reload. */
  async restore(kept: Uint8Array): Promise<void> {
    this.#start ??= await this.#trainer.exportCheckpoint();
    await this.#trainer.importCheckpoint(kept, "what this node kept");
  }

  #check(arrays: Arrays): void {
    const { parameters, buffers } = this.#trainer.manifest;
    const known = new Map([...parameters, ...buffers].map((w) => [w.name, w]));
    const odd = [
      ...parameters.filter((p) => !(p.name in arrays)).map((p) => `'${p.name}' is missing`),
      ...Object.keys(arrays).filter((name) => !known.has(name)).map((name) => `'${name}' is unknown here`),
    ];
    if (odd.length) {
      throw new FlowerError(
        `the server's tensors are not those of these artifacts: ${odd.join("; ")}\n` +
          "hint: server and clients need artifacts of the same build",
      );
    }
  }

  async #train(arrays: Arrays, told: Values, signal: AbortSignal): Promise<Content> {
    const trainer = this.#trainer;
    const settings = this.#settings(told);
    const round = Number(told["server-round"] ?? 0);
    const seed = (settings.seed * 1009 + round) % SEEDS;
    const keep = settings.optimizerState === "keep";
    this.#stays = keep || trainer.manifest.buffers.some((b) => !(b.name in arrays));
    await this.#take(arrays, keep, seed);
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
    const found: Record<string, HostTensor> = {};
    for (const name of Object.keys(arrays)) found[name] = await trainer.getParameter(name);
    const metrics = {
      "num-examples": BigInt(await countRows(this.#data, this.#specs())),
      ...Object.fromEntries([...sums].map(([name, sum]) => [name, sum / steps])),
      steps: BigInt(trainer.globalStep - first),
    };
    return { arrays: { arrays: found }, metrics: { metrics } };
  }

  async #evaluate(arrays: Arrays, signal: AbortSignal): Promise<Content> {
    for (const [name, tensor] of Object.entries(arrays)) await this.#trainer.setParameter(name, tensor);
    const found = await this.#trainer.evaluate(this.#validation, { signal });
    const rows = BigInt(await countRows(this.#validation, this.#specs()));
    return { metrics: { metrics: { "num-examples": rows, ...found } } };
  }

  #settings(told: Values): Required<{ [K in keyof RoundSettings]: NonNullable<RoundSettings[K]> }> {
    const mu = Number(told["proximal-mu"] ?? this.#proximal());
    if (mu !== this.#proximal()) {
      throw new FlowerError(`the server asks for a proximal term of ${mu}, these artifacts have ${this.#proximal()}`);
    }
    const own = this.#own;
    const number = (name: string, usual: number) => Number(told[name] ?? usual);
    const state = own.optimizerState ?? told["optimizer-state"] ?? "reset";
    if (state !== "reset" && state !== "keep") throw new FlowerError(`no such optimizer-state: ${String(state)}`);
    return {
      epochs: own.epochs ?? number("epochs", 1),
      batchSize: own.batchSize ?? number("batch-size", 32),
      learningRate: own.learningRate ?? number("lr", this.#rate),
      shuffle: own.shuffle ?? ((told["shuffle"] ?? true) as boolean),
      seed: own.seed ?? number("seed", 0),
      optimizerState: state,
    };
  }

  #proximal(): number {
    return Number((this.#trainer.manifest.optimizer as { proximal?: number }).proximal ?? 0);
  }

  /** Sets the global weights; all else is as at the start, or as this node left it. */
  async #take(arrays: Arrays, keep: boolean, seed: number): Promise<void> {
    const trainer = this.#trainer;
    const { tensors, meta } = await readCheckpoint(keep ? await trainer.exportCheckpoint() : this.#start!);
    const all = new Map(tensors);
    // Running statistics that do not travel stay with the node.
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
    const found = this.#trainer.manifest.models.find((m) => m.role === "eval");
    if (!found) throw new FlowerError("these artifacts have no eval model\nhint: build them again");
    return found;
  }
}
