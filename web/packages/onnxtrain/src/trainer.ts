/// <reference lib="esnext.disposable" preserve="true" />
import { Artifacts, type ArtifactSource, type LoadOptions } from "./artifacts.js";
import { type Meta, readCheckpoint, readProgress, type RunProgress, stateKey, writeCheckpoint, writeProgress } from "./checkpoint.js";
import { batchCount, batches, type BatchOptions, type Dataset, grouped, isColumns, unstack, stacked, stepsPerCall } from "./data.js";
import type { HostTensor, TypedArray } from "./dtypes.js";
import { type Control, type Engine, finiteLoss, type Tensors, valuesOf } from "./engine.js";
import { CheckpointError, DisposedError, type NonFiniteError, OnnxTrainError, ShapeError } from "./errors.js";
import { type Batch, feed, fit, type TensorLike } from "./feeds.js";
import { findModel, type Manifest, type ModelRole, type ModelSpec, ofRole, type TensorSpec, weightNamed, type WeightSpec, withoutHashes } from "./manifest.js";
import { classesIn, readModel } from "./onnx-model.js";
import { ReplayBuffer } from "./replay.js";
import { type Device, type RuntimeOptions, TARGETS } from "./runtime.js";
import type { Schedule } from "./schedules.js";
import { type CheckpointStore, defaultStore } from "./storage.js";
import { labelError, nonFiniteLossError, checkBatchSize, checkedRate, checkFit, checkLabels, classLabels } from "./validation.js";
import { openEngine } from "./worker-engine.js";

export interface TrainerOptions extends RuntimeOptions, Pick<LoadOptions, "cache" | "onProgress"> {
  readonly artifacts: ArtifactSource | Artifacts;
  readonly prefix?: string;
  /** Whether pages train in a worker, which keeps them responsive. Default: true. */
  readonly worker?: boolean;
  /** Random seed for dropout and shuffling, below 2^24. */
  readonly seed?: number;
  readonly store?: CheckpointStore;
  /** Symbolic sizes of the batches, by their names in the manifest: checks the memory limit before anything is downloaded. */
  readonly sizes?: Readonly<Record<string, number>>;
  /** Called with messages, such as a fallback to another device. Default: `console.warn`. */
  readonly onMessage?: (message: string) => void;
  readonly signal?: AbortSignal;
}

export type Outputs = Readonly<Record<string, HostTensor>>;

/** Loss, metrics by name, and the model outputs that were selected at build time. */
export type StepResult = {
  readonly loss: number;
  readonly step: number;
  /** Whether the parameters were updated. False while gradients are accumulated, and if the loss is not finite. */
  readonly updated: boolean;
  readonly outputs: Outputs;
} & { readonly [metric: string]: number };

export type Metrics = { readonly loss: number } & { readonly [metric: string]: number };

export interface FitOptions extends BatchOptions {
  readonly epochs?: number;
  readonly schedule?: Schedule;
  readonly validation?: Dataset;
  /**
   * Batches per call of the runtime. Default: the number of the artifacts' multi-step model, if there is one; 1 turns it
   * off. Inside a loop over `fit` the parameters may be that many steps ahead.
   */
  readonly stepsPerCall?: number;
  readonly signal?: AbortSignal;
}

/** One step of `fit`; the last step of an epoch has `validation` metrics if validation data was passed. */
export type Progress = StepResult & {
  readonly epoch: number;
  readonly learningRate: number;
  readonly totalSteps: number | undefined;
  readonly validation?: Metrics;
};

/** The graphs take seed and batch number as float32, which represents integers below this exactly. */
const SEEDS = 2 ** 24;

/** Trains the model of a directory of artifacts. */
export class Trainer {
  readonly manifest: Manifest;
  /** User values that are stored in checkpoints. */
  properties: Record<string, number | string> = {};
  learningRate: number;
  /** Rows of earlier data; checkpoints contain them. */
  replay: ReplayBuffer | undefined;
  readonly #artifacts: Artifacts;
  readonly #engine: Engine;
  readonly #store: CheckpointStore;
  readonly #manifestText: string;
  readonly #fused: boolean;
  #step = 0;
  #micro = 0;
  #seed: number;
  #meta: Meta = new Map();
  /** The last stacked batches, whose buffers are reused. */
  #stack: Tensors | undefined;
  #queue: Promise<unknown> = Promise.resolve();
  #disposed = false;

  private constructor(artifacts: Artifacts, engine: Engine, fused: boolean, options: TrainerOptions, meta: Meta) {
    this.manifest = artifacts.manifest;
    this.#artifacts = artifacts;
    this.#manifestText = withoutHashes(artifacts.text);
    this.#engine = engine;
    this.#fused = fused;
    this.#store = options.store ?? defaultStore();
    this.learningRate = this.manifest.optimizer.lr;
    this.#seed = options.seed ?? 0;
    if (meta.size) this.#restore(readProgress(meta, this.manifest.checkpoint), meta);
  }

  /** Loads artifacts and creates the training sessions on a device. */
  static async create(options: TrainerOptions): Promise<Trainer> {
    const { signal, seed = 0 } = options;
    signal?.throwIfAborted();
    if (!Number.isSafeInteger(seed) || seed < 0 || seed >= SEEDS) {
      throw new OnnxTrainError(`seed must be an integer in [0, 2^24), got ${seed}`);
    }
    const artifacts = await Artifacts.load(options.artifacts, options);
    const { manifest, text } = artifacts;
    const start = await readCheckpoint(await artifacts.file(manifest.checkpoint), manifest.checkpoint);
    artifacts.forget(manifest.checkpoint);
    const belongs = start.meta.get("manifest");
    if (belongs !== undefined && belongs !== withoutHashes(text)) {
      throw new CheckpointError(
        `manifest.json and ${manifest.checkpoint} come from different builds\n` +
          "hint: build the artifacts again; use importCheckpoint() for checkpoints of other builds",
      );
    }
    readProgress(start.meta, manifest.checkpoint);
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

  /** The device that training runs on. */
  get device(): Device {
    return this.#engine.device;
  }

  /** The number of optimizer updates. */
  get globalStep(): number {
    return this.#step;
  }

  /** The trainable parameters: names, dtypes and shapes. */
  get parameters(): readonly WeightSpec[] {
    return this.manifest.parameters;
  }

  /** Names of the inputs and targets of a batch. */
  get inputs(): readonly string[] {
    return this.#batchSpecs().map((t) => t.name);
  }

  /** Trains on one batch. If the loss is not finite, nothing changes and `updated` is false. */
  async step(batch: Batch, options: { signal?: AbortSignal } = {}): Promise<StepResult> {
    options.signal?.throwIfAborted();
    return (await this.#train([feed(this.#batchSpecs(), batch)], undefined, options.signal))[0]!;
  }

  /** Trains on one or more batches in one call of the runtime; stops at the first loss that is not finite. */
  async #train(
    feeds: readonly Tensors[], rates: readonly number[] | undefined, signal?: AbortSignal, data?: Dataset,
  ): Promise<StepResult[]> {
    for (const batch of feeds) checkBatchSize(this.manifest, this.#batchSpecs(), batch);
    // On CPUs the runtime itself rejects labels that are out of range.
    if (this.device === "webgpu") feeds.forEach((batch) => checkLabels(this.manifest, Object.fromEntries(batch)));
    return await this.#exclusive(async () => {
      signal?.throwIfAborted();
      const role = this.#fused ? "step" : "train";
      const results = await this.#explainLabels(role, feeds, data, () => this.#update(role, feeds, rates));
      if (feeds.length === 1 || results.every((f) => Number.isFinite(f.loss))) return results;
      // The call was discarded: repeat its batches one by one, up to the one whose loss is not finite.
      const single: StepResult[] = [];
      for (let i = 0; i < feeds.length && Number.isFinite(single.at(-1)?.loss ?? 0); i++) {
        single.push(...(await this.#update(role, [feeds[i]!], rates && [rates[i]!])));
      }
      return single;
    });
  }

  async #update(role: ModelRole, feeds: readonly Tensors[], rates: readonly number[] | undefined): Promise<StepResult[]> {
    const first = this.#step + 1;
    const controls = feeds.map((_, i) => ({ ...this.#control(first + i), lr: checkedRate(rates?.[i] ?? this.learningRate), discardNonFinite: true }));
    this.learningRate = controls.at(-1)!.lr;
    const several = feeds.length > 1;
    if (several) this.#stack = stacked(feeds, this.#stack);
    const outputs = await this.#engine.run(role, several ? this.#stack! : feeds[0]!, several ? controls : controls[0]!);
    const finite = finiteLoss(this.#model(role), outputs);
    // Drop the metadata of the loaded run, which is out of date now, except the digests of the graphs.
    if (finite) this.#meta = new Map([...this.#meta].filter(([key]) => key === "graphs"));
    if (this.#fused) {
      if (finite) this.#step += feeds.length;
      return feeds.map((_, i) => this.#result(role, several ? unstack(outputs, i) : outputs, first + i, finite));
    }
    if (finite) this.#micro++;
    const updated = finite && this.#micro >= this.manifest.accumulate && (await this.#flush());
    return [this.#result(role, outputs, first, updated)];
  }

  /** Runs `work`; if the runtime fails because of a label that is out of range, throws an error that names the label. */
  async #explainLabels<T>(role: ModelRole, feeds: readonly Tensors[], data: Dataset | undefined, work: () => Promise<T>): Promise<T> {
    try {
      return await work();
    } catch (error) {
      if ((error as Error).name !== "RuntimeError") throw error;
      for (const { labels: { name }, labels, classes } of await this.#labels(role)) {
        // Report the row in the dataset if there is one: rows of a shuffled batch mean nothing to the caller.
        const given = data && isColumns(data) ? [feed([labels], { [name]: data[name]! })] : feeds;
        const found = given.map((f) => labelError(name, classes, f.get(name)!)).find((e) => e !== undefined);
        if (found) throw found;
      }
      throw error;
    }
  }

  /** Returns all targets with class labels; the graph of the loss says how many classes they have. */
  async #labels(role: ModelRole): Promise<{ labels: TensorSpec; classes: number }[]> {
    const spec = this.#model(role);
    const one = classLabels(this.manifest, spec);
    if (one) return [one];
    const { file } = this.#model("eval");
    const graph = readModel(await this.#artifacts.file(file));
    this.#artifacts.forget(file);
    return ofRole(spec.inputs, "target").flatMap((labels) => {
      const classes = labels.dtype.includes("int") ? classesIn(graph, labels.name) : undefined;
      return classes === undefined ? [] : [{ labels, classes }];
    });
  }

  async *#feeds(data: Dataset, order: BatchOptions): AsyncGenerator<Tensors> {
    const specs = this.#batchSpecs();
    for await (const batch of batches(data, specs, order)) yield feed(specs, batch);
  }

  /** Applies the gradients accumulated so far; returns `false` if there are none. */
  async flush(): Promise<boolean> {
    return await this.#exclusive(() => this.#flush());
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

  /**
   * Trains for a number of epochs and yields the result of every step. Break the loop to stop. A loss that is
   * not finite ends it with a `NonFiniteError`; the weights are those before that step.
   */
  async *fit(data: Dataset, options: FitOptions = {}): AsyncGenerator<Progress, void, void> {
    const { epochs = 1, schedule, validation, signal } = options;
    checkFit(this.manifest, data, options);
    const perEpoch = batchCount(data, this.#batchSpecs(), options);
    const total = perEpoch === undefined ? undefined : perEpoch * epochs;
    if (schedule && total === undefined) {
      throw new OnnxTrainError("a schedule needs data of known length\nhint: pass columns or an array of batches");
    }
    const possible = stepsPerCall(this.manifest, this.device);
    const together = options.stepsPerCall ?? possible;
    if (together !== 1 && together !== possible) {
      const available = possible === 1 ? "" : ` or ${possible}`;
      throw new OnnxTrainError(`stepsPerCall must be 1${available} for these artifacts on ${this.device}, got ${together}`);
    }
    let done = 0;
    for (let epoch = 1; epoch <= epochs; epoch++) {
      const order = { shuffle: true, ...options, seed: (options.seed ?? this.#seed) * 1009 + epoch };
      let last: Progress | undefined;
      let batch = 0;
      for await (const group of grouped(this.#feeds(data, order), together)) {
        if (last) yield last;
        const rates = group.map((_, i) => schedule?.(done + i + 1, total!) ?? this.learningRate);
        done += group.length;
        const results = await this.#train(group, rates, signal, data);
        batch += results.length;
        const seen = results.map((f, i) => ({ ...f, epoch, learningRate: rates[i], totalSteps: total }) as Progress);
        last = seen.pop()!;
        yield* seen;
        if (!Number.isFinite(last.loss)) throw await this.#nonFiniteLossError(last, `batch ${batch} of epoch ${epoch}`, group[results.length - 1]!);
      }
      if (!this.#fused) await this.flush();
      if (!last) throw new ShapeError("the dataset has no batches");
      if (validation) {
        last = { ...last, validation: await this.evaluate(validation, { ...options, shuffle: false }) } as Progress;
      }
      yield last;
    }
  }

  async #nonFiniteLossError({ loss, step, outputs }: StepResult, where: string, batch: Tensors): Promise<NonFiniteError> {
    const { parameters, buffers } = this.manifest;
    const weights = await this.#exclusive(() => this.#engine.read([...parameters, ...buffers].map((w) => w.name)));
    return nonFiniteLossError(loss, step, where, batch, weights, new Map(Object.entries(outputs)));
  }

  /** Returns the mean loss and metrics over all rows, in evaluation mode. */
  async evaluate(data: Dataset, options: BatchOptions & { signal?: AbortSignal } = {}): Promise<Metrics> {
    const { specs, spec } = this.#evalSpecs();
    const sums: Record<string, number> = {};
    let rows = 0;
    for await (const batch of batches(data, specs, { ...options, shuffle: false, dropLast: false })) {
      options.signal?.throwIfAborted();
      const feeds = feed(specs, batch);
      const run = () => this.#engine.run("eval", feeds, this.#control(0));
      const outputs = await this.#exclusive(() => this.#explainLabels("eval", [feeds], data, run));
      const n = feeds.values().next().value?.dims[0] ?? 1;
      rows += n;
      for (const t of ofRole(spec.outputs, "loss", "metric")) {
        const name = t.role === "loss" ? "loss" : t.name;
        sums[name] = (sums[name] ?? 0) + n * Number(outputs.get(t.name)!.data[0]);
      }
    }
    if (rows === 0) throw new ShapeError("the dataset has no rows");
    return Object.fromEntries(Object.entries(sums).map(([k, v]) => [k, v / rows])) as Metrics;
  }

  /**
   * Returns the outputs of the inference model with the current weights. `last` returns the last position of sequences
   * only. `releaseTraining` closes the training sessions first to save memory; the next step opens them again.
   */
  async predict(batch: Batch, options: { signal?: AbortSignal; last?: boolean; releaseTraining?: boolean } = {}): Promise<Outputs> {
    options.signal?.throwIfAborted();
    const spec = this.manifest.models.find((m) => m.role === "infer");
    const feeds = feed(spec?.inputs ?? [], batch);
    return Object.fromEntries(await this.#exclusive(() => this.#engine.predict(feeds, options.last, options.releaseTraining)));
  }

  /** Releases the session of `predict`; the next call opens it again. */
  async releasePredictor(): Promise<void> {
    await this.#exclusive(() => this.#engine.releasePredictor());
  }

  /** Returns a copy of a parameter or buffer. */
  async getParameter(name: string): Promise<HostTensor> {
    weightNamed(this.manifest, name);
    return (await this.#exclusive(() => this.#engine.read([name]))).get(name)!;
  }

  /** Sets a parameter or buffer. */
  async setParameter(name: string, value: TensorLike): Promise<void> {
    const tensor = fit(weightNamed(this.manifest, name), value);
    const own = { ...tensor, data: tensor.data.slice() as TypedArray };
    await this.#exclusive(() => this.#engine.write(new Map([[name, own]])));
  }

  /** Returns a checkpoint of the run as a safetensors file, readable in Python too. */
  async exportCheckpoint(): Promise<Uint8Array> {
    return await this.#exclusive(async () => {
      if (this.#micro) {
        throw new OnnxTrainError("gradients are accumulated but not applied\nhint: call flush() first");
      }
      const { parameters, buffers, state } = this.manifest;
      const keys = new Map([
        ...[...parameters, ...buffers].map((w) => [w.name, w.name] as const),
        ...state.map((s) => [s.name, stateKey(s.parameter, s.slot)] as const),
      ]);
      const values = await this.#engine.read([...keys.keys()]);
      const run = { lr: this.learningRate, step: this.#step, seed: this.#seed, properties: this.properties };
      const tensors = new Map([...values].map(([name, t]) => [keys.get(name)!, t]));
      const meta = ReplayBuffer.store(this.replay, tensors, writeProgress(this.#meta, run, this.#manifestText));
      return await writeCheckpoint(tensors, meta);
    });
  }

  /** Resumes from a checkpoint; nothing changes if it does not match the artifacts. */
  async importCheckpoint(data: Uint8Array, label = "checkpoint"): Promise<void> {
    const { tensors, meta } = await readCheckpoint(data, label);
    if (!meta.has("step") && !meta.has("manifest")) {
      throw new CheckpointError(`${label}: a safetensors file without training progress\nhint: use setParameter() to load plain weights`);
    }
    const run = readProgress(meta, label);
    const values = valuesOf(this.manifest, tensors, label);
    const replay = ReplayBuffer.restore(tensors, meta, label);
    await this.#exclusive(async () => {
      await this.#engine.write(values);
      this.#micro = 0;
      this.#restore(run, meta);
      this.replay = replay ?? this.replay;
    });
  }

  #restore(run: RunProgress, meta: Meta): void {
    this.learningRate = run.lr ?? this.learningRate;
    this.#step = run.step;
    this.#seed = run.seed ?? this.#seed;
    this.properties = { ...run.properties };
    // Graph digests of another build do not apply to these artifacts.
    const own = meta.get("manifest") === this.#manifestText;
    this.#meta = own ? meta : new Map([...meta].filter(([key]) => key !== "graphs"));
  }

  /** Saves a checkpoint under a name: a path in Node, a file in the origin private file system in a page. */
  async save(name: string): Promise<void> {
    await this.#store.write(name, await this.exportCheckpoint());
  }

  /** Resumes from a checkpoint that was saved under a name. */
  async load(name: string): Promise<void> {
    await this.importCheckpoint(await this.#store.read(name), `'${name}'`);
  }

  /** Returns the trained model as an ONNX file for any runtime. */
  async exportModel(): Promise<Uint8Array> {
    return await this.#exclusive(() => this.#engine.exportModel());
  }

  /** Releases all sessions and tensors. */
  async dispose(): Promise<void> {
    if (this.#disposed) return;
    this.#disposed = true;
    await this.#queue.catch(() => undefined).then(() => this.#engine.release());
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.dispose();
  }

  /** Runs `work` after all earlier calls: each step replaces the tensors that the next one reads. */
  #exclusive<T>(work: () => Promise<T>): Promise<T> {
    if (this.#disposed) return Promise.reject(new DisposedError("this trainer was disposed"));
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
    const spec = findModel(this.manifest, role, TARGETS[this.device]);
    if (!spec) throw new OnnxTrainError(`these artifacts have no ${role} model for ${this.device}`);
    return spec;
  }

  #batchSpecs() {
    return ofRole(this.#model(this.#fused ? "step" : "train").inputs, "input", "target");
  }

  #evalSpecs() {
    const spec = this.#model("eval");
    return { spec, specs: ofRole(spec.inputs, "input", "target") };
  }

  #result(role: ModelRole, outputs: ReadonlyMap<string, HostTensor>, step: number, updated: boolean): StepResult {
    const spec = this.#model(role);
    const scalar = (name: string) => Number(outputs.get(name)!.data[0]);
    return {
      ...Object.fromEntries(ofRole(spec.outputs, "metric").map((t) => [t.name, scalar(t.name)])),
      loss: scalar(ofRole(spec.outputs, "loss")[0]!.name),
      step,
      updated,
      outputs: Object.fromEntries(ofRole(spec.outputs, "output").map((t) => [t.name, outputs.get(t.name)!])),
    } as unknown as StepResult;
  }
}
