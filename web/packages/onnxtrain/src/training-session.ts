import type { InferenceSession } from "onnxruntime-common";
import { Artifacts } from "./artifacts.js";
import { type Meta, readCheckpoint, readProgress, stateKey, writeCheckpoint } from "./checkpoint.js";
import { count, type HostTensor } from "./dtypes.js";
import { type Control, finiteLoss, LocalEngine, valuesOf } from "./engine.js";
import { ArtifactError, CheckpointError, OnnxTrainError } from "./errors.js";
import { type Batch, feed } from "./feeds.js";
import { float } from "./json-text.js";
import { findModel, type Manifest, type ModelRole, type ModelSpec, ofRole, parseManifest, type Role, type WeightSpec } from "./manifest.js";
import { type Device, inNode, type OrtTensor, type RuntimeOptions, type SessionOptions, TARGETS } from "./runtime.js";

/** The URL (or path, in Node) of a file, or its bytes. */
export type UriOrBuffer = string | Uint8Array;

export interface TrainingSessionCreateOptions {
  checkpointState: UriOrBuffer;
  trainModel: UriOrBuffer;
  optimizerModel?: UriOrBuffer;
  evalModel?: UriOrBuffer;
  /** `weights.bin`, if the models share constants. */
  weights?: UriOrBuffer;
}

type Feeds = Readonly<Record<string, OrtTensor>>;
type RunOptions = InferenceSession.RunOptions;
type Fetches = readonly string[] | Readonly<Record<string, OrtTensor | null>>;
export type ReturnType = Readonly<Record<string, OrtTensor>>;

/** Drop-in replacement for the `TrainingSession` of `onnxruntime-web/training`, on stock ONNX Runtime. */
export class TrainingSession {
  readonly #engine: LocalEngine;
  readonly #manifest: Manifest;
  readonly #roles: ReadonlySet<ModelRole>;
  #meta: Meta;
  #step: number;
  #draw = 0;
  #reset = true;
  /** Whether there are no gradients because the loss of the last batch was not finite. */
  #discarded = false;
  /** Learning rate of the next optimizer step. */
  learningRate: number;

  private constructor(engine: LocalEngine, roles: ReadonlySet<ModelRole>, meta: Meta) {
    this.#engine = engine;
    this.#manifest = engine.artifacts.manifest;
    this.#roles = roles;
    this.#meta = meta;
    const { lr, step } = readProgress(meta, "checkpointState");
    this.#step = step;
    this.learningRate = lr ?? this.#manifest.optimizer.lr;
  }

  /**
   * Creates a session from the files of `generate_artifacts` or `build`; the checkpoint contains the manifest.
   * Of ONNX Runtime's session options, only `executionProviders` is used: `["webgpu"]` trains on the GPU.
   */
  static async create(options: TrainingSessionCreateOptions, runtime: RuntimeOptions & SessionOptions = {}): Promise<TrainingSession> {
    const device = deviceOf(runtime);
    const { tensors, meta } = await readCheckpoint(await bytesOf(options.checkpointState), "checkpointState");
    const text = meta.get("manifest");
    if (text === undefined) {
      throw new CheckpointError("checkpointState: no manifest in the metadata\nhint: pass the checkpoint that was built with these models");
    }
    readProgress(meta, "checkpointState");
    const manifest = parseManifest(text, "checkpointState");
    const given: [ModelRole, UriOrBuffer | undefined][] = [
      ["train", options.trainModel], ["optimizer", options.optimizerModel], ["eval", options.evalModel],
    ];
    const files = new Map<string, Uint8Array>();
    const roles = new Set<ModelRole>();
    for (const [role, source] of given) {
      if (source === undefined) continue;
      const spec = findModel(manifest, role, TARGETS[device]);
      if (!spec) throw new CheckpointError(`checkpointState: the manifest has no ${role} model for ${device}`);
      files.set(spec.file, await bytesOf(source));
      roles.add(role);
    }
    if (manifest.weights !== null) files.set(manifest.weights, await bytesOf(weightsOf(options, manifest.weights)));
    const artifacts = Artifacts.ofParts(text, files, "checkpointState");
    const values = valuesOf(manifest, tensors, "checkpointState");
    return new TrainingSession(await LocalEngine.create(artifacts, device, [...roles], values, runtime), roles, meta);
  }

  get trainingInputNames(): readonly string[] {
    return inputsOf(this.#model("train")).map((t) => t.name);
  }

  get trainingOutputNames(): readonly string[] {
    return outputsOf(this.#model("train"));
  }

  /** Empty if the session has no eval model. */
  get evalInputNames(): readonly string[] {
    return this.#roles.has("eval") ? inputsOf(this.#model("eval")).map((t) => t.name) : [];
  }

  get evalOutputNames(): readonly string[] {
    return this.#roles.has("eval") ? outputsOf(this.#model("eval")) : [];
  }

  /** Resets the gradients at the next training step. */
  async lazyResetGrad(): Promise<void> {
    this.#reset = true;
  }

  /** Runs forward and backward on a batch and accumulates the gradients. A loss that is infinite or NaN changes nothing. */
  async runTrainStep(feeds: Feeds, fetches?: Fetches | RunOptions, _options?: RunOptions): Promise<ReturnType> {
    const names = fetchNames(this.#model("train"), fetches);
    this.#draw++;
    const { results, finite } = await this.#run("train", feeds, names);
    this.#discarded = !finite && this.#reset;
    if (finite) this.#reset = false;
    else this.#draw--;
    return results;
  }

  /** Returns the loss and outputs of a batch in evaluation mode. */
  async runEvalStep(feeds: Feeds, fetches?: Fetches | RunOptions, _options?: RunOptions): Promise<ReturnType> {
    if (!this.#roles.has("eval")) throw new Error("This TrainingSession has no EvalModel loaded.");
    return (await this.#run("eval", feeds, fetchNames(this.#model("eval"), fetches))).results;
  }

  /** Updates the parameters with the gradients, if there are any. */
  async runOptimizerStep(_options?: RunOptions): Promise<void> {
    if (!this.#roles.has("optimizer")) throw new Error("This TrainingSession has no OptimizerModel loaded.");
    if (this.#discarded) return;
    this.#step++;
    await this.#engine.run("optimizer", new Map(), this.#control());
  }

  async #run(role: ModelRole, feeds: Feeds, names: readonly string[]): Promise<{ results: ReturnType; finite: boolean }> {
    const spec = this.#model(role);
    const batch = feed(inputsOf(spec), feeds as Batch);
    const outputs = await this.#engine.run(role, batch, { ...this.#control(), discardNonFinite: true });
    const results: ReturnType = Object.fromEntries(names.map((n) => [n, this.#engine.runtime.tensor(outputs.get(n)!, n)]));
    const named = new Proxy(results, { get: (own, name) => Reflect.get(own, typeof name === "string" ? currentName(spec, name) : name) });
    return { results: named, finite: finiteLoss(spec, outputs) };
  }

  #control(): Control {
    return { lr: this.learningRate, step: this.#step, seed: 0, draw: this.#draw, reset: this.#reset };
  }

  #model(role: ModelRole): ModelSpec {
    return findModel(this.#manifest, role, TARGETS[this.#engine.device])!;
  }

  /** Parameters in the order of the training model's inputs, optionally with frozen parameters and buffers. */
  #weights(trainableOnly: boolean): readonly WeightSpec[] {
    const { parameters, buffers } = this.#manifest;
    const known = new Map([...parameters, ...buffers].map((w) => [w.name, w]));
    const listed = JSON.parse(this.#meta.get("parameters") ?? "null") as Record<"trainable" | "frozen", string[]> | null;
    const named = new Set(listed ? [...listed.trainable, ...listed.frozen] : known.keys());
    const roles: Role[] = trainableOnly ? ["parameter"] : ["parameter", "frozen", "buffer"];
    const weights = ofRole(this.#model("train").inputs, ...roles).filter((t) => named.has(t.name)).map((t) => known.get(t.name)!);
    const odd = weights.find((w) => w.dtype !== "float32");
    if (odd) throw new OnnxTrainError(`'${odd.name}' is ${odd.dtype}, but a parameter buffer holds float32`);
    return weights;
  }

  /** Returns the total number of elements of the parameters. */
  async getParametersSize(trainableOnly = true): Promise<number> {
    return this.#weights(trainableOnly).reduce((n, w) => n + count(w.shape), 0);
  }

  /** Returns the parameters concatenated to one float32 vector. */
  async getContiguousParameters(trainableOnly = true): Promise<OrtTensor> {
    const weights = this.#weights(trainableOnly);
    const data = new Float32Array(await this.getParametersSize(trainableOnly));
    const values = await this.#engine.read(weights.map((w) => w.name));
    let at = 0;
    for (const w of weights) {
      data.set(values.get(w.name)!.data as Float32Array, at);
      at += count(w.shape);
    }
    return this.#engine.runtime.tensor({ dtype: "float32", dims: [data.length], data });
  }

  /** Sets the parameters from the bytes of such a vector. */
  async loadParametersBuffer(buffer: Uint8Array, trainableOnly = true): Promise<void> {
    const size = await this.getParametersSize(trainableOnly);
    if (buffer.length !== 4 * size) {
      throw new Error(`the buffer has ${buffer.length} bytes, expected ${4 * size} (${size} float32 parameters)`);
    }
    const all = new Float32Array(buffer.slice().buffer);
    const values = new Map<string, HostTensor>();
    let at = 0;
    for (const w of this.#weights(trainableOnly)) {
      values.set(w.name, { dtype: w.dtype, dims: w.shape, data: all.slice(at, (at += count(w.shape))) });
    }
    await this.#engine.write(values);
  }

  /** Returns a checkpoint that JavaScript and Python can resume from. */
  async exportCheckpoint(): Promise<Uint8Array> {
    const { parameters, buffers, state } = this.#manifest;
    const weights = await this.#engine.read([...parameters, ...buffers].map((w) => w.name));
    const slots = await this.#engine.read(state.map((s) => s.name));
    const tensors = new Map([...weights, ...state.map((s) => [stateKey(s.parameter, s.slot), slots.get(s.name)!] as const)]);
    const meta = new Map([...this.#meta, ["lr", float(this.learningRate)], ["step", String(this.#step)]]);
    for (const [key, value] of [["properties", "{}"], ["seed", "0"]] as const) if (!meta.has(key)) meta.set(key, value);
    return await writeCheckpoint(tensors, meta);
  }

  /** Releases all sessions and tensors. */
  async release(): Promise<void> {
    await this.#engine.release();
  }
}

export declare namespace TrainingSession {
  export type { UriOrBuffer };
}

/** Returns the name of the loss for a name that onnxruntime-training generated for it, such as `onnx::loss::8`. */
const currentName = (spec: ModelSpec, name: string): string =>
  /^onnx::.+::\d+$/.test(name) && !outputsOf(spec).includes(name) ? (ofRole(spec.outputs, "loss")[0]?.name ?? name) : name;

function deviceOf({ device, executionProviders = [] }: RuntimeOptions & SessionOptions): Device {
  if (device && device !== "auto") return device;
  const [first] = executionProviders.map((p) => (typeof p === "string" ? p : p.name));
  return first === "webgpu" ? "webgpu" : inNode() ? "node" : "wasm";
}

const inputsOf = (spec: ModelSpec) => ofRole(spec.inputs, "input", "target");
const outputsOf = (spec: ModelSpec) => ofRole(spec.outputs, "loss", "metric", "output").map((t) => t.name);

/** Returns the requested outputs: a list of names or an object with names as keys. Other objects are run options: all outputs. */
function fetchNames(spec: ModelSpec, fetches: Fetches | RunOptions | undefined): readonly string[] {
  const known = outputsOf(spec);
  if (fetches === undefined) return known;
  if (Array.isArray(fetches)) {
    if (fetches.length === 0) throw new TypeError("fetches must name at least one output");
    return (fetches as unknown[]).map((name) => {
      if (typeof name !== "string") throw new TypeError(`fetches must be names, got ${typeof name}`);
      const current = currentName(spec, name);
      if (!known.includes(current)) throw new RangeError(`unknown output: '${name}' (expected one of ${known.join(", ")})`);
      return current;
    });
  }
  if (typeof fetches !== "object" || fetches === null) throw new TypeError("fetches must be a list or an object");
  const requested = Object.keys(fetches).map((n) => currentName(spec, n)).filter((n) => known.includes(n));
  return requested.length ? requested : known;
}

/** Returns where to load the weights file from: models refer to it by name only, so it is next to the training model. */
function weightsOf(options: TrainingSessionCreateOptions, file: string): UriOrBuffer {
  if (options.weights !== undefined) return options.weights;
  if (typeof options.trainModel === "string") {
    return options.trainModel.slice(0, options.trainModel.lastIndexOf("/") + 1) + file;
  }
  throw new ArtifactError(`these models need ${file}\nhint: pass it as \`weights\``);
}

async function bytesOf(source: UriOrBuffer): Promise<Uint8Array> {
  if (typeof source !== "string") return source;
  const at = source.lastIndexOf("/") + 1;
  return await Artifacts.raw(source.slice(0, at) || ".", source.slice(at));
}
