import { Artifacts, type ArtifactSource } from "./artifacts.js";
import { batchCount, batches, type BatchOptions, type Dataset } from "./data.js";
import type { HostTensor, TypedArray } from "./dtypes.js";
import { valuesOf, type Control, type Engine, type Tensors } from "./engine.js";
import { CheckpointError, DisposedError, OnnxTrainError, ShapeError } from "./errors.js";
import { feed, fit, type Batch, type TensorLike } from "./feeds.js";
import { compact, entries, float, join, write } from "./json-text.js";
import { findModel, ofRole, withoutHashes, type Manifest, type ModelRole, type ModelSpec, type WeightSpec } from "./manifest.js";
import { openEngine } from "./open-engine.js";
import { TARGETS, type Device, type RuntimeOptions } from "./runtime.js";
import { readCheckpoint, stateKey, writeCheckpoint, type Meta } from "./safetensors.js";
import type { Schedule } from "./schedules.js";
import { grouped, nth, stacked, stepsPerCall } from "./several-steps.js";
import { defaultStore, type CheckpointStore } from "./storage.js";

/** Random numbers take the seed and the count of batches as float32, which holds these exactly. */
const SEEDS = 2 ** 24;

export interface TrainerOptions extends RuntimeOptions {
  readonly artifacts: ArtifactSource | Artifacts;
  readonly prefix?: string;
  /** Train in a worker, so that the page stays live: so it is in pages unless this is `false`. */
  readonly worker?: boolean;
  /** Of dropout masks and of the order of the data; below 2^24. */
  readonly seed?: number;
  readonly store?: CheckpointStore;
  /** Told what happens besides training, such as a change of device. */
  readonly onMessage?: (message: string) => void;
  readonly signal?: AbortSignal;
}

export type Outputs = Readonly<Record<string, HostTensor>>;

/** Loss, metrics by their names, and the model's own outputs if they were asked for at build time. */
export type StepResult = {
  readonly loss: number;
  readonly step: number;
  /** Whether parameters changed: not on every batch when gradients are accumulated. */
  readonly updated: boolean;
  readonly outputs: Outputs;
} & { readonly [metric: string]: number };

export type Metrics = { readonly loss: number } & { readonly [metric: string]: number };

export interface FitOptions extends BatchOptions {
  readonly epochs?: number;
  readonly schedule?: Schedule;
  readonly validation?: Dataset;
  /**
   * How many batches go to the runtime in one call, if the artifacts have a model for that: so it
   * is unless this is 1. Parameters are then up to so many steps ahead of what the loop has seen.
   */
  readonly stepsPerCall?: number;
  readonly signal?: AbortSignal;
}

/** One step of `fit`; the last step of an epoch has `validation`, where there is such data. */
export type Progress = StepResult & {
  readonly epoch: number;
  readonly learningRate: number;
  readonly totalSteps: number | undefined;
  readonly validation?: Metrics;
};

/** Trains artifacts. */
export class Trainer {
  readonly manifest: Manifest;
  /** Values of your own that checkpoints keep. */
  properties: Record<string, number | string> = {};
  learningRate: number;
  readonly #engine: Engine;
  readonly #store: CheckpointStore;
  readonly #manifestText: string;
  readonly #fused: boolean;
  #step = 0;
  #micro = 0;
  #seed: number;
  #meta: Meta = new Map();
  /** The last batches of several steps: the memory is used again. */
  #stack: Tensors | undefined;
  #queue: Promise<unknown> = Promise.resolve();
  #disposed = false;

  private constructor(artifacts: Artifacts, engine: Engine, fused: boolean, options: TrainerOptions, meta: Meta) {
    this.manifest = artifacts.manifest;
    this.#manifestText = withoutHashes(artifacts.text);
    this.#engine = engine;
    this.#fused = fused;
    this.#store = options.store ?? defaultStore();
    this.learningRate = this.manifest.optimizer.lr;
    this.#seed = options.seed ?? 0;
    if (meta.size) this.#restore(meta);
  }

  /** Opens artifacts and prepares their models on a device. */
  static async create(options: TrainerOptions): Promise<Trainer> {
    const { signal, seed = 0 } = options;
    signal?.throwIfAborted();
    if (!Number.isSafeInteger(seed) || seed < 0 || seed >= SEEDS) {
      throw new OnnxTrainError(`seed must be a whole number in [0, 2^24): ${seed}`);
    }
    const artifacts = await Artifacts.load(options.artifacts, options);
    const { manifest } = artifacts;
    const start = await readCheckpoint(await artifacts.file(manifest.checkpoint), manifest.checkpoint);
    artifacts.forget(manifest.checkpoint);
    const belongs = start.meta.get("manifest");
    if (belongs !== undefined && belongs !== withoutHashes(artifacts.text)) {
      throw new CheckpointError(
        `manifest.json and ${manifest.checkpoint} do not belong together\n` +
          "hint: build the artifacts again; importCheckpoint() takes checkpoints of other builds",
      );
    }
    const values = valuesOf(manifest, start.tensors, manifest.checkpoint);
    signal?.throwIfAborted();
    const fused = manifest.accumulate === 1 && manifest.models.some((m) => m.role === "step");
    const roles: ModelRole[] = fused ? ["step"] : ["train", "optimizer"];
    const engine = await openEngine(artifacts, roles, values, options);
    if (signal?.aborted) {
      await engine.release();
      signal.throwIfAborted();
    }
    return new Trainer(artifacts, engine, fused, options, start.meta);
  }

  /** Where training runs. */
  get device(): Device {
    return this.#engine.device;
  }

  /** How many updates there were. */
  get globalStep(): number {
    return this.#step;
  }

  /** The parameters that are trained: names, types and shapes. */
  get parameters(): readonly WeightSpec[] {
    return this.manifest.parameters;
  }

  /** Names of the tensors of a batch. */
  get inputs(): readonly string[] {
    return this.#batchSpecs().map((t) => t.name);
  }

  /** Trains on one batch. */
  async step(batch: Batch, options: { signal?: AbortSignal } = {}): Promise<StepResult> {
    options.signal?.throwIfAborted();
    return (await this.#train([feed(this.#batchSpecs(), batch)], undefined, options.signal))[0]!;
  }

  /** Trains on batches in one call; the learning rate becomes that of the last. */
  async #train(feeds: readonly Tensors[], rates: readonly number[] | undefined, signal?: AbortSignal): Promise<StepResult[]> {
    return await this.#alone(async () => {
      signal?.throwIfAborted();
      const first = this.#step + 1;
      const role = this.#fused ? "step" : "train";
      this.learningRate = rates?.at(-1) ?? this.learningRate;
      const controls = feeds.map((_, i) => ({ ...this.#control(first + i), lr: rates?.[i] ?? this.learningRate }));
      const several = feeds.length > 1;
      if (several) this.#stack = stacked(feeds, this.#stack);
      const found = await this.#engine.run(role, several ? this.#stack! : feeds[0]!, several ? controls : controls[0]!);
      this.#meta = new Map();
      if (this.#fused) {
        this.#step += feeds.length;
        return feeds.map((_, i) => this.#result(role, several ? nth(found, i) : found, first + i, true));
      }
      this.#micro++;
      const updated = this.#micro >= this.manifest.accumulate && (await this.#flush());
      return [this.#result(role, found, first, updated)];
    });
  }

  async *#feeds(data: Dataset, order: BatchOptions): AsyncGenerator<Tensors> {
    const specs = this.#batchSpecs();
    for await (const batch of batches(data, specs, order)) yield feed(specs, batch);
  }

  /** Updates with the gradients accumulated so far; `false` if there are none. */
  async flush(): Promise<boolean> {
    return await this.#alone(() => this.#flush());
  }

  async #flush(): Promise<boolean> {
    if (this.#micro === 0) return false;
    const number = this.#step + 1;
    const control = { ...this.#control(number), scale: 1 / this.#micro };
    await this.#engine.run("optimizer", new Map(), control);
    this.#step = number;
    this.#micro = 0;
    return true;
  }

  /** Trains for some epochs and gives what every step found. Leave the loop to stop. */
  async *fit(data: Dataset, options: FitOptions = {}): AsyncGenerator<Progress, void, void> {
    const { epochs = 1, schedule, validation, signal } = options;
    const perEpoch = batchCount(data, this.#batchSpecs(), options);
    const total = perEpoch === undefined ? undefined : perEpoch * epochs;
    if (schedule && total === undefined) {
      throw new OnnxTrainError("a schedule needs data whose length is known\nhint: give columns or a list of batches");
    }
    const possible = stepsPerCall(this.manifest, this.device);
    const together = options.stepsPerCall ?? possible;
    if (together !== 1 && together !== possible) {
      const there = possible === 1 ? "" : ` or ${possible}`;
      throw new OnnxTrainError(`stepsPerCall: ${together}, but these artifacts have models for 1${there} on ${this.device}`);
    }
    let done = 0;
    for (let epoch = 1; epoch <= epochs; epoch++) {
      const order = { shuffle: true, ...options, seed: (options.seed ?? this.#seed) * 1009 + epoch };
      let last: Progress | undefined;
      for await (const group of grouped(this.#feeds(data, order), together)) {
        if (last) yield last;
        const rates = group.map((_, i) => schedule?.(done + i + 1, total!) ?? this.learningRate);
        done += group.length;
        const found = await this.#train(group, rates, signal);
        const seen = found.map((f, i) => ({ ...f, epoch, learningRate: rates[i], totalSteps: total }) as Progress);
        last = seen.pop();
        yield* seen;
      }
      if (!this.#fused) await this.flush();
      if (!last) throw new ShapeError("the data has no batches");
      if (validation) {
        last = { ...last, validation: await this.evaluate(validation, { ...options, shuffle: false }) } as Progress;
      }
      yield last;
    }
  }

  /** Gives loss and metrics over all rows, in evaluation mode. */
  async evaluate(data: Dataset, options: BatchOptions & { signal?: AbortSignal } = {}): Promise<Metrics> {
    const { specs, spec } = this.#evalSpecs();
    const sums: Record<string, number> = {};
    let rows = 0;
    for await (const batch of batches(data, specs, { ...options, shuffle: false, dropLast: false })) {
      options.signal?.throwIfAborted();
      const feeds = feed(specs, batch);
      const found = await this.#alone(() => this.#engine.run("eval", feeds, this.#control(0)));
      const n = feeds.values().next().value?.dims[0] ?? 1;
      rows += n;
      for (const t of ofRole(spec.outputs, "loss", "metric")) {
        const name = t.role === "loss" ? "loss" : t.name;
        sums[name] = (sums[name] ?? 0) + n * Number(found.get(t.name)!.data[0]);
      }
    }
    if (rows === 0) throw new ShapeError("the data has no rows");
    return Object.fromEntries(Object.entries(sums).map(([k, v]) => [k, v / rows])) as Metrics;
  }

  /** Gives the outputs of the inference model with the current weights. */
  async predict(batch: Batch, options: { signal?: AbortSignal } = {}): Promise<Outputs> {
    options.signal?.throwIfAborted();
    const spec = this.manifest.models.find((m) => m.role === "infer");
    const feeds = feed(spec?.inputs ?? [], batch);
    return Object.fromEntries(await this.#alone(() => this.#engine.predict(feeds)));
  }

  /** Gives a copy of a parameter or buffer. */
  async getParameter(name: string): Promise<HostTensor> {
    this.#weight(name);
    return (await this.#alone(() => this.#engine.read([name]))).get(name)!;
  }

  /** Sets a parameter or buffer. */
  async setParameter(name: string, value: TensorLike): Promise<void> {
    const found = fit(this.#weight(name), value);
    const own = { ...found, data: found.data.slice() as TypedArray };
    await this.#alone(() => this.#engine.write(new Map([[name, own]])));
  }

  #weight(name: string): WeightSpec {
    const weights = [...this.manifest.parameters, ...this.manifest.buffers];
    const found = weights.find((w) => w.name === name || w.aliases.includes(name));
    if (!found) {
      throw new ShapeError(`no such parameter: '${name}'\nhint: there are ${weights.map((w) => w.name).join(", ")}`);
    }
    return found;
  }

  /** Gives everything that training needs to go on, as the safetensors file that Python reads. */
  async exportCheckpoint(): Promise<Uint8Array> {
    return await this.#alone(async () => {
      if (this.#micro) {
        throw new OnnxTrainError("gradients are accumulated but not applied\nhint: call flush() first");
      }
      const { parameters, buffers, state } = this.manifest;
      const keys = new Map([
        ...[...parameters, ...buffers].map((w) => [w.name, w.name] as const),
        ...state.map((s) => [s.name, stateKey(s.parameter, s.slot)] as const),
      ]);
      const values = await this.#engine.read([...keys.keys()]);
      const tensors = new Map([...values].map(([name, t]) => [keys.get(name)!, t]));
      return await writeCheckpoint(tensors, this.#progress());
    });
  }

  /** Goes on from a checkpoint; nothing changes if it does not fit. */
  async importCheckpoint(data: Uint8Array, label = "checkpoint"): Promise<void> {
    const { tensors, meta } = await readCheckpoint(data, label);
    if (!meta.has("step") && !meta.has("manifest")) {
      throw new CheckpointError(`${label}: no progress of a training run in it\nhint: setParameter() takes plain weights`);
    }
    const values = valuesOf(this.manifest, tensors, label);
    await this.#alone(async () => {
      await this.#engine.write(values);
      this.#micro = 0;
      this.#step = 0;
      this.#restore(meta);
    });
  }

  #progress(): Meta {
    const old = this.#meta.get("properties");
    const before = old ? entries(compact(old)) : new Map<string, string>();
    const properties = Object.entries(this.properties).map(([name, value]) => {
      const text = before.get(name);
      return [name, text !== undefined && JSON.parse(text) === value ? text : write(value)] as const;
    });
    return new Map([
      ...this.#meta,
      ["lr", float(this.learningRate)],
      ["manifest", this.#manifestText],
      ["properties", join(new Map(properties))],
      ["seed", String(this.#seed)],
      ["step", String(this.#step)],
    ]);
  }

  #restore(meta: Meta): void {
    const value = (key: string): unknown => {
      const text = meta.get(key);
      return text === undefined ? undefined : JSON.parse(text);
    };
    this.learningRate = Number(value("lr") ?? this.learningRate);
    this.#step = Number(value("step") ?? 0);
    this.#seed = Number(value("seed") ?? this.#seed);
    this.properties = { ...((value("properties") ?? {}) as Record<string, number | string>) };
    this.#meta = meta;
  }

  /** Keeps a checkpoint under a name: a path in Node, the origin's own files in a page. */
  async save(name: string): Promise<void> {
    await this.#store.write(name, await this.exportCheckpoint());
  }

  /** Goes on from a checkpoint that was kept under a name. */
  async load(name: string): Promise<void> {
    await this.importCheckpoint(await this.#store.read(name), `'${name}'`);
  }

  /** Gives the trained model, ready for any runtime. */
  async exportModel(): Promise<Uint8Array> {
    return await this.#alone(() => this.#engine.exportModel());
  }

  /** Frees everything. */
  async dispose(): Promise<void> {
    if (this.#disposed) return;
    this.#disposed = true;
    await this.#queue.catch(() => undefined);
    await this.#engine.release();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose();
  }

  /** One after the other: a step replaces what the next one reads. */
  #alone<T>(work: () => Promise<T>): Promise<T> {
    if (this.#disposed) return Promise.reject(new DisposedError("this trainer was disposed of"));
    const next = this.#queue.then(work, work);
    this.#queue = next.catch(() => undefined);
    return next;
  }

  #control(step: number): Control {
    const { accumulate } = this.manifest;
    return {
      lr: this.learningRate,
      step,
      seed: this.#seed,
      draw: ((((step - 1) * accumulate + this.#micro + 1) % SEEDS) + SEEDS) % SEEDS,
      reset: this.#micro === 0,
    };
  }

  #model(role: ModelRole): ModelSpec {
    const found = findModel(this.manifest, role, TARGETS[this.device]);
    if (!found) throw new OnnxTrainError(`these artifacts have no ${role} model for ${this.device}`);
    return found;
  }

  #batchSpecs() {
    return ofRole(this.#model(this.#fused ? "step" : "train").inputs, "input", "target");
  }

  #evalSpecs() {
    const spec = this.#model("eval");
    return { spec, specs: ofRole(spec.inputs, "input", "target") };
  }

  #result(role: ModelRole, found: ReadonlyMap<string, HostTensor>, step: number, updated: boolean): StepResult {
    const spec = this.#model(role);
    const scalar = (name: string) => Number(found.get(name)!.data[0]);
    return {
      ...Object.fromEntries(ofRole(spec.outputs, "metric").map((t) => [t.name, scalar(t.name)])),
      loss: scalar(ofRole(spec.outputs, "loss")[0]!.name),
      step,
      updated,
      outputs: Object.fromEntries(ofRole(spec.outputs, "output").map((t) => [t.name, found.get(t.name)!])),
    } as unknown as StepResult;
  }
}
