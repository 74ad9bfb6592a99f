import { stateKey } from "./checkpoint.js";
import { filled, type HostTensor, castFloat, toBytes } from "./dtypes.js";
import { ArtifactError, CheckpointError, wrapRuntimeError, ShapeError } from "./errors.js";
import { findModel, type Manifest, type ModelRole, type ModelSpec, ofRole, type TensorSpec, type WeightSpec } from "./manifest.js";
import { checkMemory, sizesIn } from "./memory-plan.js";
import { weightsAsInputs } from "./protobuf.js";
import { type Device, isNative, type OrtSession, type OrtTensor, Runtime, type RuntimeOptions, TARGETS } from "./runtime.js";
import type { FileData } from "./weights-file.js";

export type Tensors = ReadonlyMap<string, HostTensor>;

/** Scalar inputs of a step. */
export interface Control {
  readonly lr: number;
  readonly step: number;
  readonly seed: number;
  /** Number of the batch; with `seed` it determines the random numbers of dropout. */
  readonly draw: number;
  readonly reset?: boolean;
  readonly scale?: number;
  /** Discard the new parameters and state if the loss is not finite. */
  readonly discardNonFinite?: boolean;
}

/** Runs the models, in this thread or in a worker. */
export interface Engine {
  readonly device: Device;
  /**
   * Runs a model on a batch. Outputs that feed inputs stay on the device, the others are returned. With a list of
   * controls the batch is a stack of as many batches.
   */
  run(role: ModelRole, batch: Tensors, control: Control | readonly Control[]): Promise<Map<string, HostTensor>>;
  /**
   * Runs the inference model with the current weights. `last` returns the last position of sequences only;
   * `releaseTraining` closes the training sessions first, so that the weights are in memory once.
   */
  predict(batch: Tensors, last?: boolean, releaseTraining?: boolean): Promise<Map<string, HostTensor>>;
  /** Releases the session of `predict`; the next call opens it again. */
  releasePredictor(): Promise<void>;
  /** Returns copies of parameters, buffers and state, by their names in the manifest. */
  read(names: readonly string[]): Promise<Map<string, HostTensor>>;
  write(tensors: Tensors): Promise<void>;
  exportModel(): Promise<Uint8Array>;
  release(): Promise<void>;
}

/** What an engine needs from artifacts: the manifest and verified files. */
export interface ModelFiles {
  readonly manifest: Manifest;
  file(name: string): Promise<Uint8Array>;
  /** Like `file`, but the weights file may be returned as a `Blob` that is not in memory. */
  data(name: string): Promise<FileData>;
  /** Drops the cached bytes of a file. */
  forget(name: string): void;
}

interface Loaded {
  readonly spec: ModelSpec;
  readonly session: OrtSession;
}

/** Runs models in this thread. Parameters and state stay in device memory. */
export class LocalEngine implements Engine {
  readonly #models = new Map<string, Promise<Loaded>>();
  readonly #values = new Map<string, OrtTensor>();
  #predictor: Promise<OrtSession> | undefined;

  private constructor(
    readonly artifacts: ModelFiles,
    readonly runtime: Runtime,
    readonly memoryLimit: number | undefined,
  ) {}

  get device(): Device {
    return this.runtime.device;
  }

  /** Loads the runtime and the models of `roles`, and sets the initial values. */
  static async create(
    artifacts: ModelFiles, device: Device, roles: readonly ModelRole[], values: Tensors, options: RuntimeOptions,
  ): Promise<LocalEngine> {
    const engine = new LocalEngine(artifacts, await Runtime.open(device, options), options.memoryLimit);
    try {
      await engine.write(values);
      for (const role of roles) await engine.#model(role);
    } catch (error) {
      await engine.release();
      throw error;
    }
    return engine;
  }

  #model(role: ModelRole, steps = 1): Promise<Loaded> {
    const key = `${role} ${steps}`;
    let model = this.#models.get(key);
    if (!model) {
      model = this.#open(role, steps);
      this.#models.set(key, model);
      model.catch(() => this.#models.delete(key));
    }
    return model;
  }

  async #open(role: ModelRole, steps: number): Promise<Loaded> {
    const { manifest } = this.artifacts;
    const spec = findModel(manifest, role, TARGETS[this.device], steps);
    if (!spec) {
      const available = manifest.models.map((m) => `${m.role} (${m.target})`).join(", ");
      throw new ArtifactError(
        `these artifacts have no ${role} model for ${this.device}, only ${available}\n` +
          `hint: build them again: onnxtrain build model.onnx ... --target ${isNative(this.device) ? "cpu" : "web"}`,
      );
    }
    for (const t of ofRole(spec.inputs, "accumulator")) {
      if (!this.#values.has(t.name)) this.#set(t.name, filled(t.dtype, t.shape.map(Number), 0));
    }
    const data = await this.artifacts.file(spec.file);
    const onGpu = spec.outputs.filter((t) => t.feeds !== null).map((t) => t.name);
    const external = await externalData(this.artifacts, spec);
    try {
      const session = await this.runtime.session(data, external, { onGpu });
      return { spec, session };
    } catch (error) {
      throw wrapRuntimeError(error, `${spec.file} on ${this.device}`);
    } finally {
      if (!sharesFrozenWeights(manifest)) this.artifacts.forget(spec.file); // otherwise the file is small, and will be opened again
    }
  }

  #set(name: string, t: HostTensor): void {
    this.#replace(name, this.runtime.tensor(t, name));
  }

  #replace(name: string, tensor: OrtTensor): void {
    const old = this.#values.get(name);
    this.#values.set(name, tensor);
    if (old && old !== tensor) old.dispose();
  }

  async run(role: ModelRole, batch: Tensors, control: Control | readonly Control[]): Promise<Map<string, HostTensor>> {
    const controls = "length" in control ? control : [control];
    const { spec, session } = await this.#model(role, controls.length);
    if (controls.length === 1 && batch.size) checkMemory(this.artifacts.manifest, this.device, sizesIn(spec.inputs, batch), this.memoryLimit);
    const feeds: Record<string, OrtTensor> = {};
    const gradients = role === "optimizer" ? await this.#gradientNames() : [];
    let next = 0;
    for (const t of spec.inputs) {
      const given = batch.get(t.name) ?? controlTensor(t, controls);
      // The optimizer model takes the accumulated gradients in the order of the training model.
      const own = t.role === "gradient" ? this.#values.get(gradients[next++] ?? "") : this.#values.get(t.name);
      const tensor = given ? this.runtime.tensor(given, t.name) : own;
      if (!tensor) throw new ShapeError(`${spec.file}: no value for input '${t.name}' (${t.role})`);
      feeds[t.name] = tensor;
    }
    let results: Awaited<ReturnType<OrtSession["run"]>>;
    try {
      results = await this.runtime.run(session, feeds);
    } catch (error) {
      throw wrapRuntimeError(error, `${spec.file} on ${this.device}`);
    }
    const out = new Map<string, HostTensor>();
    for (const t of spec.outputs.filter((t) => t.feeds === null)) {
      const value = results[t.name] as OrtTensor;
      out.set(t.name, await this.runtime.host(value));
      value.dispose();
    }
    const keep = !controls[0]!.discardNonFinite || finiteLoss(spec, out);
    for (const t of spec.outputs.filter((t) => t.feeds !== null)) {
      const value = results[t.name] as OrtTensor;
      if (keep) this.#replace(t.feeds!, value);
      else value.dispose();
    }
    return out;
  }

  async #gradientNames(): Promise<string[]> {
    const { spec } = await this.#model("train");
    return ofRole(spec.inputs, "accumulator").map((t) => t.name);
  }

  async predict(batch: Tensors, last = false, releaseTraining = false): Promise<Map<string, HostTensor>> {
    const { manifest } = this.artifacts;
    // On WebGPU, tensors belong to the session that created them: it has to stay open.
    if (releaseTraining && this.device !== "webgpu") await this.#closeModels();
    const spec = inferenceModel(manifest);
    const weights = inferenceWeights(manifest);
    if (!this.#predictor) {
      this.#predictor = this.#openPredictor(spec, weights);
      this.#predictor.catch(() => (this.#predictor = undefined));
    }
    const session = await this.#predictor;
    const feeds = Object.fromEntries([...batch].map(([n, t]) => [n, this.runtime.tensor(t, n)]));
    for (const w of weights) feeds[w.name] = await this.#stored(w);
    const out = new Map<string, HostTensor>();
    try {
      const results = await this.runtime.run(session, feeds);
      for (const t of spec.outputs) {
        const value = results[t.name] as OrtTensor;
        const whole = await this.runtime.host(value);
        out.set(t.name, last ? lastPosition(whole) : whole);
        value.dispose();
      }
    } catch (error) {
      throw wrapRuntimeError(error, `${spec.file} on ${this.device}`);
    }
    return out;
  }

  /** Releases the training sessions; the next step opens them again. */
  async #closeModels(): Promise<void> {
    const loaded = await Promise.allSettled(this.#models.values());
    this.#models.clear();
    for (const result of loaded) if (result.status === "fulfilled") await result.value.session.release();
  }

  async releasePredictor(): Promise<void> {
    const session = await this.#predictor?.catch(() => undefined);
    this.#predictor = undefined;
    await session?.release();
  }

  async #openPredictor(spec: ModelSpec, weights: readonly WeightSpec[]): Promise<OrtSession> {
    const stored = weights.map((w) => ({ ...w, dtype: storedType(w) }));
    const model = weightsAsInputs(await this.artifacts.file(spec.file), stored);
    try {
      return await this.runtime.session(model, await externalData(this.artifacts, spec));
    } catch (error) {
      throw wrapRuntimeError(error, `${spec.file} on ${this.device}`);
    }
  }

  /** Returns a weight in the dtype of the inference model: models in 16 bits are trained in float32. */
  async #stored(w: WeightSpec): Promise<OrtTensor> {
    const value = this.#values.get(w.name)!;
    const dtype = storedType(w);
    return dtype === w.dtype ? value : this.runtime.tensor(castFloat(await this.runtime.host(value), dtype), w.name);
  }

  async read(names: readonly string[]): Promise<Map<string, HostTensor>> {
    const values = new Map<string, HostTensor>();
    for (const name of names) {
      const value = this.#values.get(name);
      if (!value) throw new CheckpointError(`'${name}' has no value`);
      const t = await this.runtime.host(value);
      values.set(name, { ...t, data: t.data.slice() });
    }
    return values;
  }

  async write(tensors: Tensors): Promise<void> {
    for (const [name, t] of tensors) this.#set(name, t);
  }

  async exportModel(): Promise<Uint8Array> {
    const { manifest } = this.artifacts;
    const spec = inferenceModel(manifest);
    const model = (await this.artifacts.file(spec.file)).slice();
    const weights = [...manifest.parameters, ...manifest.buffers];
    const values = await this.read(weights.map((w) => w.name));
    for (const w of weights) {
      for (const place of w.locations) {
        const bytes = toBytes(castFloat(values.get(w.name)!, place.dtype));
        if (place.file !== spec.file || place.nbytes !== bytes.length || place.offset + place.nbytes > model.length) {
          throw new ArtifactError(`'${w.name}': location in ${place.file} does not match its ${bytes.length} bytes in ${spec.file}`);
        }
        model.set(bytes, place.offset);
      }
    }
    return model;
  }

  async release(): Promise<void> {
    await Promise.allSettled(this.#models.values());
    for (const value of this.#values.values()) value.dispose(); // before the sessions that created them
    this.#values.clear();
    await this.#closeModels();
    await this.releasePredictor();
  }
}

/** Returns the tensors of a checkpoint by their names in the manifest; throws if names, shapes or dtypes differ. */
export function valuesOf(manifest: Manifest, tensors: Tensors, label: string): Map<string, HostTensor> {
  const problems: string[] = [];
  const values = new Map<string, HostTensor>();
  const read = (key: string, name: string, shape: readonly number[], dtype: string) => {
    const t = tensors.get(key);
    if (!t) problems.push(`'${key}' is missing`);
    else if (t.dims.join() !== shape.join()) {
      problems.push(`'${key}' has shape [${t.dims.join(", ")}], expected [${shape.join(", ")}]`);
    } else if (t.dtype !== dtype) problems.push(`'${key}' is ${t.dtype}, expected ${dtype}`);
    else values.set(name, t);
  };
  for (const w of [...manifest.parameters, ...manifest.buffers]) read(w.name, w.name, w.shape, w.dtype);
  for (const s of manifest.state) read(stateKey(s.parameter, s.slot), s.name, s.shape, s.dtype);
  if (problems.length) {
    const more = problems.length > 5 ? `\n  ... and ${problems.length - 5} more` : "";
    throw new CheckpointError(
      `${label} does not fit these artifacts:\n  ${problems.slice(0, 5).join("\n  ")}${more}`,
    );
  }
  return values;
}

/** Returns whether the inference model shares the weights file with the training models: adapters built for the web. */
const sharesFrozenWeights = ({ options }: Manifest): boolean => Boolean(options["adapters"] && options["memory"]);

/** Returns the external data of a model in ONNX Runtime's format. */
async function externalData(files: ModelFiles, model: ModelSpec): Promise<{ path: string; data: FileData }[]> {
  const { weights } = files.manifest;
  if (weights === null || (model.role === "infer" && !sharesFrozenWeights(files.manifest))) return [];
  return [{ path: weights, data: await files.data(weights) }];
}

/** Slices tensors [batch, length, width] to the last position: [batch, 1, width]. */
function lastPosition({ dtype, dims, data }: HostTensor): HostTensor {
  if (dims.length !== 3 || dims[1]! < 2) return { dtype, dims, data };
  const [rows, length, width] = dims as [number, number, number];
  const own = new (data.constructor as new (n: number) => Float32Array)(rows * width);
  for (let i = 0; i < rows; i++) own.set(data.subarray(((i + 1) * length - 1) * width, (i + 1) * length * width) as Float32Array, i * width);
  return { dtype, dims: [rows, 1, width], data: own };
}

/** Returns whether the loss, or each loss of a multi-step call, is finite. */
export const finiteLoss = (spec: ModelSpec, outputs: Tensors): boolean =>
  ofRole(spec.outputs, "loss").every((t) => Array.from(outputs.get(t.name)!.data, Number).every(Number.isFinite));

function inferenceModel(manifest: Manifest): ModelSpec {
  const spec = manifest.models.find((m) => m.role === "infer");
  if (!spec) throw new ArtifactError("these artifacts have no inference model\nhint: build them again");
  return spec;
}

/** Returns the parameters and buffers that the inference model contains. */
const inferenceWeights = (manifest: Manifest): WeightSpec[] =>
  [...manifest.parameters, ...manifest.buffers].filter((w) => w.locations.length > 0);

function controlTensor({ role, dtype, shape }: TensorSpec, controls: readonly Control[]): HostTensor | undefined {
  const dims = shape.map(Number);
  const floats = (of: (c: Control) => readonly number[]) => ({ dtype, dims, data: Float32Array.from(controls.flatMap(of)) });
  if (role === "lr") return floats((c) => [c.lr]);
  if (role === "grad_scale") return floats((c) => [c.scale ?? 1]);
  if (role === "rng") return floats((c) => [c.seed, c.draw]);
  if (role === "reset") return { dtype, dims, data: Uint8Array.from(controls, (c) => (c.reset === false ? 0 : 1)) };
  if (role === "step") {
    const steps = controls.map((c) => c.step);
    return { dtype, dims, data: dtype === "int32" ? Int32Array.from(steps) : BigInt64Array.from(steps, BigInt) };
  }
  return undefined;
}

/** Returns the dtype of a weight in the inference model. */
const storedType = (w: WeightSpec): string => w.locations[0]?.dtype ?? w.dtype;
