/// <reference lib="esnext.disposable" preserve="true" />
import { Artifacts } from "./artifacts.js";
import { checkedRate, checkFit } from "./checks.js";
import { batchCount, batches, isColumns, type BatchOptions, type Dataset } from "./data.js";
import { badLabel, badLoss, checkBatchSize, checkLabels, classLabels } from "./diagnosis.js";
import type { HostTensor, TypedArray } from "./dtypes.js";
import { finiteLoss, valuesOf, type Control, type Engine, type Tensors } from "./engine.js";
import { CheckpointError, DisposedError, OnnxTrainError, ShapeError, type NonFiniteError } from "./errors.js";
import { feed, fit, type Batch, type TensorLike } from "./feeds.js";
import { findModel, ofRole, withoutHashes, type Manifest, type ModelRole, type ModelSpec, type WeightSpec, weightNamed } from "./manifest.js";
import { openEngine } from "./open-engine.js";
import { readProgress, writeProgress, type RunProgress } from "./progress.js";
import { TARGETS, type Device } from "./runtime.js";
import { readCheckpoint, stateKey, writeCheckpoint, type Meta } from "./safetensors.js";
import { grouped, nth, stacked, stepsPerCall } from "./several-steps.js";
import { defaultStore, type CheckpointStore } from "./storage.js";
import type { FitOptions, Metrics, Outputs, Progress, StepResult, TrainerOptions } from "./trainer-types.js";

export type { FitOptions, Metrics, Outputs, Progress, StepResult, TrainerOptions } from "./trainer-types.js";

/** Random numbers take the seed and the count of batches as float32, which holds these exactly. */
const SEEDS = 2 ** 24;

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
    if (meta.size) this.#restore(readProgress(meta, this.manifest.checkpoint), meta);
  }

  /** Opens artifacts and prepares their models on a device. */
  static async create(options: TrainerOptions): Promise<Trainer> {
    const { signal, seed = 0 } = options;
    signal?.throwIfAborted();
    if (!Number.isSafeInteger(seed) || seed < 0 || seed >= SEEDS) {
      throw new OnnxTrainError(`seed must be a whole number in [0, 2^24): ${seed}`);
    }
    const artifacts = await Artifacts.load(options.artifacts, options);
    const { manifest, text } = artifacts;
    const start = await readCheckpoint(await artifacts.file(manifest.checkpoint), manifest.checkpoint);
    artifacts.forget(manifest.checkpoint);
    const belongs = start.meta.get("manifest");
    if (belongs !== undefined && belongs !== withoutHashes(text)) {
      throw new CheckpointError(
        `manifest.json and ${manifest.checkpoint} do not belong together\n` +
          "hint: build the artifacts again; importCheckpoint() takes checkpoints of other builds",
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

  /** Trains on one batch. Where the loss is not finite nothing changes, and `updated` is false. */
  async step(batch: Batch, options: { signal?: AbortSignal } = {}): Promise<StepResult> {
    options.signal?.throwIfAborted();
    return (await this.#train([feed(this.#batchSpecs(), batch)], undefined, options.signal))[0]!;
  }

  /** Trains on batches, in one call where they are several; nothing is trained on after a loss that is not finite. */
  async #train(
    feeds: readonly Tensors[], rates: readonly number[] | undefined, signal?: AbortSignal, data?: Dataset,
  ): Promise<StepResult[]> {
    for (const batch of feeds) checkBatchSize(this.manifest, this.#batchSpecs(), batch);
    // Other devices refuse such labels themselves.
    if (this.device === "webgpu") feeds.forEach((batch) => checkLabels(this.manifest, Object.fromEntries(batch)));
    return await this.#alone(async () => {
      signal?.throwIfAborted();
      const role = this.#fused ? "step" : "train";
      const found = await this.#blamed(role, feeds, data, () => this.#update(role, feeds, rates));
      if (feeds.length === 1 || found.every((f) => Number.isFinite(f.loss))) return found;
      // Nothing of that call stayed: one by one, up to the batch that is to blame.
      const single: StepResult[] = [];
      for (let i = 0; i < feeds.length && Number.isFinite(single.at(-1)?.loss ?? 0); i++) {
        single.push(...(await this.#update(role, [feeds[i]!], rates && [rates[i]!])));
      }
      return single;
    });
  }

  async #update(role: ModelRole, feeds: readonly Tensors[], rates: readonly number[] | undefined): Promise<StepResult[]> {
    const first = this.#step + 1;
    const controls = feeds.map((_, i) => ({ ...this.#control(first + i), lr: checkedRate(rates?.[i] ?? this.learningRate), onlyFinite: true }));
    this.learningRate = controls.at(-1)!.lr;
    const several = feeds.length > 1;
    if (several) this.#stack = stacked(feeds, this.#stack);
    const found = await this.#engine.run(role, several ? this.#stack! : feeds[0]!, several ? controls : controls[0]!);
    const stays = finiteLoss(this.#model(role), found);
    // A run's position is over now; which graphs the weights belong to is not.
    if (stays) this.#meta = new Map([...this.#meta].filter(([key]) => key === "graphs"));
    if (this.#fused) {
      if (stays) this.#step += feeds.length;
      return feeds.map((_, i) => this.#result(role, several ? nth(found, i) : found, first + i, stays));
    }
    if (stays) this.#micro++;
    const updated = stays && this.#micro >= this.manifest.accumulate && (await this.#flush());
    return [this.#result(role, found, first, updated)];
  }

  /** Does the work; where the runtime fails at a label that is no class, the error names the label. */
  async #blamed<T>(role: ModelRole, feeds: readonly Tensors[], data: Dataset | undefined, work: () => Promise<T>): Promise<T> {
    try {
      return await work();
    } catch (error) {
      const known = (error as Error).name === "RuntimeError" && classLabels(this.manifest, this.#model(role));
      if (!known) throw error;
      const { labels: { name }, labels, classes } = known;
      // Rows of all the data, where there are such, say more than those of a shuffled batch.
      const given = data && isColumns(data) ? [feed([labels], { [name]: data[name]! })] : feeds;
      throw given.map((f) => badLabel(name, classes, f.get(name)!)).find((e) => e !== undefined) ?? error;
    }
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

  /**
   * Trains for some epochs and gives what every step found. Leave the loop to stop. A loss that is
   * not finite ends it with a `NonFiniteError`; the weights are those before that step.
   */
  async *fit(data: Dataset, options: FitOptions = {}): AsyncGenerator<Progress, void, void> {
    const { epochs = 1, schedule, validation, signal } = options;
    checkFit(this.manifest, data, options);
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
      let batch = 0;
      for await (const group of grouped(this.#feeds(data, order), together)) {
        if (last) yield last;
        const rates = group.map((_, i) => schedule?.(done + i + 1, total!) ?? this.learningRate);
        done += group.length;
        const found = await this.#train(group, rates, signal, data);
        batch += found.length;
        const seen = found.map((f, i) => ({ ...f, epoch, learningRate: rates[i], totalSteps: total }) as Progress);
        last = seen.pop()!;
        yield* seen;
        if (!Number.isFinite(last.loss)) throw await this.#badLoss(last, `batch ${batch} of epoch ${epoch}`, group[found.length - 1]!);
      }
      if (!this.#fused) await this.flush();
      if (!last) throw new ShapeError("the data has no batches");
      if (validation) {
        last = { ...last, validation: await this.evaluate(validation, { ...options, shuffle: false }) } as Progress;
      }
      yield last;
    }
  }

  async #badLoss({ loss, step, outputs }: StepResult, where: string, batch: Tensors): Promise<NonFiniteError> {
    const { parameters, buffers } = this.manifest;
    const weights = await this.#alone(() => this.#engine.read([...parameters, ...buffers].map((w) => w.name)));
    return badLoss(loss, step, where, batch, weights, new Map(Object.entries(outputs)));
  }

  /** Gives loss and metrics over all rows, in evaluation mode. */
  async evaluate(data: Dataset, options: BatchOptions & { signal?: AbortSignal } = {}): Promise<Metrics> {
    const { specs, spec } = this.#evalSpecs();
    const sums: Record<string, number> = {};
    let rows = 0;
    for await (const batch of batches(data, specs, { ...options, shuffle: false, dropLast: false })) {
      options.signal?.throwIfAborted();
      const feeds = feed(specs, batch);
      const run = () => this.#engine.run("eval", feeds, this.#control(0));
      const found = await this.#alone(() => this.#blamed("eval", [feeds], data, run));
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

  /**
   * Gives the outputs of the inference model with the current weights: of sequences the `last`
   * position only, and `alone` in memory, which the next step has to open its session again for.
   */
  async predict(batch: Batch, options: { signal?: AbortSignal; last?: boolean; alone?: boolean } = {}): Promise<Outputs> {
    options.signal?.throwIfAborted();
    const spec = this.manifest.models.find((m) => m.role === "infer");
    const feeds = feed(spec?.inputs ?? [], batch);
    return Object.fromEntries(await this.#alone(() => this.#engine.predict(feeds, options.last, options.alone)));
  }

  /** Lets go of what `predict` holds in memory; the next prediction opens it again. */
  async rest(): Promise<void> {
    await this.#alone(() => this.#engine.rest());
  }

  /** Gives a copy of a parameter or buffer. */
  async getParameter(name: string): Promise<HostTensor> {
    weightNamed(this.manifest, name);
    return (await this.#alone(() => this.#engine.read([name]))).get(name)!;
  }

  /** Sets a parameter or buffer. */
  async setParameter(name: string, value: TensorLike): Promise<void> {
    const found = fit(weightNamed(this.manifest, name), value);
    const own = { ...found, data: found.data.slice() as TypedArray };
    await this.#alone(() => this.#engine.write(new Map([[name, own]])));
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
      const run = { lr: this.learningRate, step: this.#step, seed: this.#seed, properties: this.properties };
      const tensors = new Map([...values].map(([name, t]) => [keys.get(name)!, t]));
      return await writeCheckpoint(tensors, writeProgress(this.#meta, run, this.#manifestText));
    });
  }

  /** Goes on from a checkpoint; nothing changes if it does not fit. */
  async importCheckpoint(data: Uint8Array, label = "checkpoint"): Promise<void> {
    const { tensors, meta } = await readCheckpoint(data, label);
    if (!meta.has("step") && !meta.has("manifest")) {
      throw new CheckpointError(`${label}: no progress of a training run in it\nhint: setParameter() takes plain weights`);
    }
    const run = readProgress(meta, label);
    const values = valuesOf(this.manifest, tensors, label);
    await this.#alone(async () => {
      await this.#engine.write(values);
      this.#micro = 0;
      this.#restore(run, meta);
    });
  }

  #restore(run: RunProgress, meta: Meta): void {
    this.learningRate = run.lr ?? this.learningRate;
    this.#step = run.step;
    this.#seed = run.seed ?? this.#seed;
    this.properties = { ...run.properties };
    // The graphs of another build are not those that go on from here.
    const own = meta.get("manifest") === this.#manifestText;
    this.#meta = own ? meta : new Map([...meta].filter(([key]) => key !== "graphs"));
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
    await this.#queue.catch(() => undefined).then(() => this.#engine.release());
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
