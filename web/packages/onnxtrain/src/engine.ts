import { filled, inType, toBytes, type HostTensor } from "./dtypes.js";
import { ArtifactError, CheckpointError, ShapeError } from "./errors.js";
import { failed } from "./failures.js";
import { findModel, ofRole, type Manifest, type ModelRole, type ModelSpec, type TensorSpec, type WeightSpec } from "./manifest.js";
import { checkMemory, sizesIn } from "./memory-plan.js";
import { Runtime, TARGETS, type Device, type OrtSession, type OrtTensor, type RuntimeOptions } from "./runtime.js";
import { stateKey } from "./safetensors.js";
import { weightsAsInputs } from "./weight-inputs.js";
import type { FileData } from "./weights-file.js";

export type Tensors = ReadonlyMap<string, HostTensor>;

/** What a step is told besides the batch. */
export interface Control {
  readonly lr: number;
  readonly step: number;
  readonly seed: number;
  /** Counts batches, for random numbers. */
  readonly draw: number;
  readonly reset?: boolean;
  readonly scale?: number;
  /** Where the loss is not finite nothing stays: parameters and state are those before. */
  readonly onlyFinite?: boolean;
}

/** What runs the models: here, or in a worker. */
export interface Engine {
  readonly device: Device;
  /**
   * Runs a model on a batch; outputs that feed inputs stay, the others are given back. A list of
   * controls stands for as many batches, stacked.
   */
  run(role: ModelRole, batch: Tensors, control: Control | readonly Control[]): Promise<Map<string, HostTensor>>;
  /**
   * Runs the inference model with the current weights; `last` gives the last position of sequences
   * only, and `alone` closes the sessions that train before, so that weights are in memory once.
   */
  predict(batch: Tensors, last?: boolean, alone?: boolean): Promise<Map<string, HostTensor>>;
  /** Lets go of the session that predicts; the next prediction opens it again. */
  rest(): Promise<void>;
  /** Gives parameters, buffers and state by the names in the manifest. */
  read(names: readonly string[]): Promise<Map<string, HostTensor>>;
  write(tensors: Tensors): Promise<void>;
  exportModel(): Promise<Uint8Array>;
  release(): Promise<void>;
}

/** What an engine needs of artifacts: the manifest, and files that were checked. */
export interface ModelFiles {
  readonly manifest: Manifest;
  file(name: string): Promise<Uint8Array>;
  /** Gives a file as `file` does; that of the weights need not be in memory. */
  data(name: string): Promise<FileData>;
  /** Lets go of a file's bytes. */
  forget(name: string): void;
}

interface Loaded {
  readonly spec: ModelSpec;
  readonly session: OrtSession;
}

/** Runs models in this thread. Parameters and state stay where the device has them. */
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
    let found = this.#models.get(key);
    if (!found) {
      found = this.#open(role, steps);
      this.#models.set(key, found);
      found.catch(() => this.#models.delete(key));
    }
    return found;
  }

  async #open(role: ModelRole, steps: number): Promise<Loaded> {
    const { manifest } = this.artifacts;
    const spec = findModel(manifest, role, TARGETS[this.device], steps);
    if (!spec) {
      const there = manifest.models.map((m) => `${m.role} (${m.target})`).join(", ");
      throw new ArtifactError(
        `these artifacts have no ${role} model for ${this.device}, only ${there}\n` +
          `hint: build them with target="${TARGETS[this.device][0]}"`,
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
      throw failed(error, `${spec.file} on ${this.device}`);
    } finally {
      if (!writtenOnce(manifest)) this.artifacts.forget(spec.file); // else it is small, and opened again
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
      // The optimizer's gradients are those of the training model, in the same order.
      const own = t.role === "gradient" ? this.#values.get(gradients[next++] ?? "") : this.#values.get(t.name);
      const found = given ? this.runtime.tensor(given, t.name) : own;
      if (!found) throw new ShapeError(`'${t.name}' (${t.role}) of ${spec.file} has no value`);
      feeds[t.name] = found;
    }
    let results: Awaited<ReturnType<OrtSession["run"]>>;
    try {
      results = await this.runtime.run(session, feeds);
    } catch (error) {
      throw failed(error, `${spec.file} on ${this.device}`);
    }
    const out = new Map<string, HostTensor>();
    for (const t of spec.outputs.filter((t) => t.feeds === null)) {
      const value = results[t.name] as OrtTensor;
      out.set(t.name, await this.runtime.host(value));
      value.dispose();
    }
    const stays = !controls[0]!.onlyFinite || finiteLoss(spec, out);
    for (const t of spec.outputs.filter((t) => t.feeds !== null)) {
      const value = results[t.name] as OrtTensor;
      if (stays) this.#replace(t.feeds!, value);
      else value.dispose();
    }
    return out;
  }

  async #gradientNames(): Promise<string[]> {
    const { spec } = await this.#model("train");
    return ofRole(spec.inputs, "accumulator").map((t) => t.name);
  }

  async predict(batch: Tensors, last = false, alone = false): Promise<Map<string, HostTensor>> {
    const { manifest } = this.artifacts;
    // Tensors on a GPU belong to the session that made them.
    if (alone && this.device !== "webgpu") await this.#closeModels();
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
      throw failed(error, `${spec.file} on ${this.device}`);
    }
    return out;
  }

  /** Lets go of the sessions that train; the next step opens its own again. */
  async #closeModels(): Promise<void> {
    const loaded = await Promise.allSettled(this.#models.values());
    this.#models.clear();
    for (const found of loaded) if (found.status === "fulfilled") await found.value.session.release();
  }

  async rest(): Promise<void> {
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
      throw failed(error, `${spec.file} on ${this.device}`);
    }
  }

  /** Gives a weight as the inference model has it: a file in 16 bits is trained in float32. */
  async #stored(w: WeightSpec): Promise<OrtTensor> {
    const value = this.#values.get(w.name)!;
    const dtype = storedType(w);
    return dtype === w.dtype ? value : this.runtime.tensor(inType(await this.runtime.host(value), dtype), w.name);
  }

  async read(names: readonly string[]): Promise<Map<string, HostTensor>> {
    const found = new Map<string, HostTensor>();
    for (const name of names) {
      const value = this.#values.get(name);
      if (!value) throw new CheckpointError(`'${name}' has no value`);
      const t = await this.runtime.host(value);
      found.set(name, { ...t, data: t.data.slice() });
    }
    return found;
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
        const bytes = toBytes(inType(values.get(w.name)!, place.dtype));
        if (place.file !== spec.file || place.nbytes !== bytes.length || place.offset + place.nbytes > model.length) {
          throw new ArtifactError(`'${w.name}': its place in ${place.file} is not ${bytes.length} bytes of ${spec.file}`);
        }
        model.set(bytes, place.offset);
      }
    }
    return model;
  }

  async release(): Promise<void> {
    await Promise.allSettled(this.#models.values());
    for (const value of this.#values.values()) value.dispose(); // before the sessions that made them
    this.#values.clear();
    await this.#closeModels();
    await this.rest();
  }
}

/** Gives the values that a checkpoint holds, by the names in the manifest; refuses what does not fit. */
export function valuesOf(manifest: Manifest, tensors: Tensors, label: string): Map<string, HostTensor> {
  const problems: string[] = [];
  const found = new Map<string, HostTensor>();
  const take = (key: string, name: string, shape: readonly number[], dtype: string) => {
    const t = tensors.get(key);
    if (!t) problems.push(`'${key}' is missing`);
    else if (t.dims.join() !== shape.join()) {
      problems.push(`'${key}' has shape [${t.dims.join(", ")}], expected [${shape.join(", ")}]`);
    } else if (t.dtype !== dtype) problems.push(`'${key}' is ${t.dtype}, expected ${dtype}`);
    else found.set(name, t);
  };
  for (const w of [...manifest.parameters, ...manifest.buffers]) take(w.name, w.name, w.shape, w.dtype);
  for (const s of manifest.state) take(stateKey(s.parameter, s.slot), s.name, s.shape, s.dtype);
  if (problems.length) {
    const more = problems.length > 5 ? `\n  ... and ${problems.length - 5} more` : "";
    throw new CheckpointError(
      `${label} does not fit these artifacts:\n  ${problems.slice(0, 5).join("\n  ")}${more}`,
    );
  }
  return found;
}

/** Says whether what adapters stand beside is written once, for the inference model too: so it was built for tabs. */
const writtenOnce = ({ options }: Manifest): boolean => Boolean(options["adapters"] && options["memory"]);

/** Gives the external data that a model may refer to, as ONNX Runtime takes it. */
async function externalData(files: ModelFiles, model: ModelSpec): Promise<{ path: string; data: FileData }[]> {
  const { weights } = files.manifest;
  if (weights === null || (model.role === "infer" && !writtenOnce(files.manifest))) return [];
  return [{ path: weights, data: await files.data(weights) }];
}

/** Gives the last place along the second axis, of tensors that have three: [batch, 1, ...]. */
function lastPosition({ dtype, dims, data }: HostTensor): HostTensor {
  if (dims.length !== 3 || dims[1]! < 2) return { dtype, dims, data };
  const [rows, length, width] = dims as [number, number, number];
  const own = new (data.constructor as new (n: number) => Float32Array)(rows * width);
  for (let i = 0; i < rows; i++) own.set(data.subarray(((i + 1) * length - 1) * width, (i + 1) * length * width) as Float32Array, i * width);
  return { dtype, dims: [rows, 1, width], data: own };
}

/** Tells whether the loss that a model gave, or all of them, are numbers. */
export const finiteLoss = (spec: ModelSpec, found: Tensors): boolean =>
  ofRole(spec.outputs, "loss").every((t) => Array.from(found.get(t.name)!.data, Number).every(Number.isFinite));

function inferenceModel(manifest: Manifest): ModelSpec {
  const spec = manifest.models.find((m) => m.role === "infer");
  if (!spec) throw new ArtifactError("these artifacts have no infer model\nhint: build them again");
  return spec;
}

/** Gives the weights that the inference model has. */
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

/** Gives the element type that a weight has in the inference model. */
const storedType = (w: WeightSpec): string => w.locations[0]?.dtype ?? w.dtype;
