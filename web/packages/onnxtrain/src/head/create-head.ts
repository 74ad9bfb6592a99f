import { Graph } from "./graph.js";
import { type Activation, ACTIVATIONS, backward, forward, type Layer } from "./layers.js";
import { addLoss, type HeadLoss, type Backend } from "./losses.js";
import { type HeadOptimizer, type Rule, ruleOf, updateConcatenated } from "./optimizers.js";
import { stateKey, writeCheckpoint } from "../checkpoint.js";
import { count, filled, type HostTensor, toBytes } from "../dtypes.js";
import { OnnxTrainError } from "../errors.js";
import { write } from "../json-text.js";
import { FORMAT, type Location, type ModelRole, type ModelSpec, type Role, type TensorSpec, withoutHashes } from "../manifest.js";
import { field, model, tensor } from "../protobuf.js";
import { uniform } from "../random.js";
import { sha256 } from "../sha256.js";

/** Options of `createHead`. */
export interface HeadOptions {
  /** Number of input features, such as the size of an embedding. */
  readonly inputs: number;
  /** Number of classes. */
  readonly classes?: number;
  /** Number of regression outputs, instead of `classes`; the default loss is then `"mse"`. */
  readonly outputs?: number;
  /** Sizes of the hidden layers. Default: none. */
  readonly hidden?: readonly number[];
  /** Activation between layers. Default: `"relu"`. */
  readonly activation?: Activation;
  readonly loss?: HeadLoss;
  /** Name or options of the optimizer. Default: AdamW with a learning rate of 0.001. */
  readonly optimizer?: HeadOptimizer | NonNullable<HeadOptimizer["name"]>;
  /** Random seed for the initial weights, which are bit-identical on every platform. Default: 0. */
  readonly seed?: number;
  /** Fixed batch size. Default: any size. */
  readonly batch?: number;
}

export interface Settings {
  readonly sizes: readonly number[];
  readonly activation: Activation;
  readonly loss: HeadLoss;
  readonly optimizer: Required<HeadOptimizer>;
  readonly seed: number;
  readonly batch: number | undefined;
}

const LOSSES: readonly string[] = ["cross_entropy", "bce_with_logits", "mse", "l1", "huber"];
const OPTIMIZERS: Readonly<Record<string, readonly string[]>> = {
  adamw: ["betas", "eps", "lr", "weightDecay"],
  adam: ["betas", "eps", "lr", "weightDecay"],
  sgd: ["lr", "momentum", "nesterov", "weightDecay"],
};
const OPTIONS = ["inputs", "classes", "outputs", "hidden", "activation", "loss", "optimizer", "seed", "batch"];
/** Maximum number of elements of a weight, from the limits of typed arrays in browsers. */
const LIMIT = 2 ** 28;

const invalid = (what: string, expected: string, value: unknown): never => {
  throw new OnnxTrainError(`createHead: '${what}' must be ${expected}, got ${value === undefined ? "nothing" : format(value)}`);
};
const format = (value: unknown): string =>
  typeof value === "number" || typeof value === "bigint" ? String(value) : (JSON.stringify(value) ?? typeof value);
const isInteger = (v: unknown, least: number): v is number => Number.isSafeInteger(v) && (v as number) >= least;

function integer(what: string, value: unknown, least = 1): number {
  return isInteger(value, least) ? value : invalid(what, `an integer >= ${least}`, value);
}

function number(what: string, value: unknown, below = Infinity): number {
  const fits = typeof value === "number" && value >= 0 && value < below;
  return fits ? value : invalid(what, below === Infinity ? "a number >= 0" : `a number in [0, ${below})`, value);
}

function oneOf<T extends string>(what: string, value: unknown, words: readonly string[]): T {
  return words.includes(value as string) ? (value as T) : invalid(what, `one of ${words.join(", ")}`, value);
}

function checkNames(what: string, given: object, names: readonly string[]): void {
  const other = Object.keys(given).find((k) => !names.includes(k));
  if (other !== undefined) throw new OnnxTrainError(`createHead: unknown ${what}: '${other}'\nhint: expected one of ${names.join(", ")}`);
}

function resolveOptimizer(given: HeadOptions["optimizer"]): Required<HeadOptimizer> {
  const settings: HeadOptimizer = typeof given === "string" ? { name: given } : (given ?? {});
  if (typeof settings !== "object") invalid("optimizer", "a name or an object of options", given);
  const name = oneOf<"adamw" | "adam" | "sgd">("optimizer", settings.name ?? "adamw", Object.keys(OPTIMIZERS));
  checkNames(`option of optimizer '${name}'`, settings, ["name", ...OPTIMIZERS[name]!]);
  const { lr = 1e-3, betas = [0.9, 0.999], eps = 1e-8, momentum = 0, nesterov = false } = settings;
  if (!Array.isArray(betas) || betas.length !== 2) invalid("optimizer.betas", "two numbers", betas);
  if (nesterov && !momentum) invalid("optimizer.momentum", "above 0 with nesterov", momentum);
  return {
    name, nesterov,
    lr: number("optimizer.lr", lr),
    weightDecay: number("optimizer.weightDecay", settings.weightDecay ?? (name === "adamw" ? 0.01 : 0)),
    betas: [number("optimizer.betas", betas[0], 1), number("optimizer.betas", betas[1], 1)],
    eps: number("optimizer.eps", eps),
    momentum: number("optimizer.momentum", momentum),
  };
}

/** Validates options and fills in defaults. */
export function resolveOptions(options: HeadOptions): Settings {
  checkNames("option", options, OPTIONS);
  const { classes, outputs, hidden = [], batch } = options;
  if ((classes === undefined) === (outputs === undefined)) {
    throw new OnnxTrainError("createHead: pass either 'classes' or 'outputs'");
  }
  const loss = oneOf<HeadLoss>("loss", options.loss ?? (classes === undefined ? "mse" : "cross_entropy"), LOSSES);
  if (!Array.isArray(hidden)) invalid("hidden", "a list of sizes", hidden);
  const last = classes === undefined ? integer("outputs", outputs) : integer("classes", classes);
  if (loss === "cross_entropy" && last < 2) invalid(classes === undefined ? "outputs" : "classes", "2 or more with cross_entropy", last);
  const sizes = [integer("inputs", options.inputs), ...hidden.map((n, i) => integer(`hidden[${i}]`, n)), last];
  sizes.slice(1).forEach((n, i) => {
    if (n * sizes[i]! > LIMIT) throw new OnnxTrainError(`createHead: a layer of ${sizes[i]} x ${n} is too large for a browser`);
  });
  return {
    sizes, loss,
    activation: oneOf<Activation>("activation", options.activation ?? "relu", Object.keys(ACTIVATIONS)),
    optimizer: resolveOptimizer(options.optimizer),
    seed: integer("seed", options.seed ?? 0, 0),
    batch: batch === undefined ? undefined : integer("batch", batch),
  };
}

const OPSET = 21;
const IR_VERSION = 10;
const STEPS = 8;
/** Parameters and state up to this many bytes get a multi-step model on wasm: larger ones gain nothing from it. */
const MULTI_STEP_LIMIT = 20_000_000;
/** State below this is flushed to 0: CPUs are slow on denormals, and wasm cannot disable them. */
const TINY = 1e-35;
const INFERENCE = "inference_model.onnx";

/** What all models of a head have in common. */
interface Head {
  readonly settings: Settings;
  readonly rule: Rule;
  readonly layers: readonly Layer[];
  /** Names and shapes of the parameters. */
  readonly weights: readonly Named[];
  readonly state: readonly (Named & { readonly parameter: string; readonly slot: string })[];
  readonly output: string;
}

interface Named {
  readonly name: string;
  readonly shape: readonly number[];
}

interface Model {
  readonly bytes: Uint8Array;
  readonly spec: Omit<ModelSpec, "sha256">;
}

/**
 * Builds the artifacts of an MLP, without Python and without a download. Returns files by name, for `Trainer.create`
 * and for `Trainer` in Python.
 */
export async function createHead(options: HeadOptions): Promise<Map<string, Uint8Array>> {
  const head = headOf(resolveOptions(options));
  const values = initialWeights(head);
  const inference = inferenceModel(head, values);
  const models = [
    evalModel(head, "wasm"), stepModel(head, "wasm"), ...(fitsMultiStep(head) ? [multiStepModel(head)] : []), inference.model,
    evalModel(head, "webgpu"), stepModel(head, "webgpu"),
  ];
  const listed = await Promise.all(models.map(async (m) => ({ ...m.spec, sha256: await sha256(m.bytes) })));
  const text = write(manifestOf(head, listed, inference.locations));
  const state = head.state.map((s) => [stateKey(s.parameter, s.slot), filled("float32", s.shape, 0)] as const);
  const checkpoint = await writeCheckpoint(new Map([...values, ...state]), new Map([["manifest", withoutHashes(text)]]));
  return new Map([
    ...models.map((m) => [m.spec.file, m.bytes] as const),
    ["checkpoint", checkpoint],
    ["manifest.json", new TextEncoder().encode(text)],
  ]);
}

function headOf(settings: Settings): Head {
  const { sizes, loss } = settings;
  const rule = ruleOf(settings.optimizer);
  const layers = sizes.slice(1).map((_, i) => ({ weight: `layers.${i}.weight`, bias: `layers.${i}.bias` }));
  const weights = layers.flatMap(({ weight, bias }, i) => [
    { name: weight, shape: [sizes[i + 1]!, sizes[i]!] },
    { name: bias, shape: [sizes[i + 1]!] },
  ]);
  const state = weights.flatMap(({ name, shape }) =>
    rule.slots.map((slot) => ({ name: `${name}.${slot}`, shape, parameter: name, slot })));
  const output = loss === "cross_entropy" || loss === "bce_with_logits" ? "logits" : "prediction";
  return { settings, rule, layers, weights, state, output };
}

/** Initializes weights like `torch.nn.Linear`: uniform in +-1 / sqrt(fan_in). */
function initialWeights({ settings: { sizes, seed }, weights }: Head): Map<string, HostTensor> {
  const next = uniform(seed);
  return new Map(weights.map(({ name, shape }, i) => {
    const bound = 1 / Math.sqrt(sizes[i >> 1]!);
    const data = Float32Array.from({ length: count(shape) }, () => (2 * next() - 1) * bound);
    return [name, { dtype: "float32", dims: shape, data }];
  }));
}

const fitsMultiStep = ({ weights, state }: Head): boolean => 4 * [...weights, ...state].reduce((n, t) => n + count(t.shape), 0) <= MULTI_STEP_LIMIT;

const spec = (name: string, dtype: string, shape: readonly (number | string)[], role: Role, feeds: string | null = null): TensorSpec =>
  ({ name, dtype, shape, role, feeds });

const parameters = ({ weights }: Head): TensorSpec[] => weights.map((w) => spec(w.name, "float32", w.shape, "parameter"));

/** Returns the input and the target of a batch. */
function batchSpecs({ settings: { sizes, loss, batch } }: Head, backend: Backend): [TensorSpec, TensorSpec] {
  const rows = batch ?? "batch";
  const x = spec("x", "float32", [rows, sizes[0]!], "input");
  if (loss !== "cross_entropy") return [x, spec("target", "float32", [rows, sizes.at(-1)!], "target")];
  return [x, spec("labels", backend === "webgpu" ? "int32" : "int64", [rows], "target")];
}

function lossSpecs({ settings: { loss } }: Head): TensorSpec[] {
  const names = loss === "cross_entropy" ? [spec("accuracy", "float32", [], "metric")] : [];
  return [spec("loss", "float32", [], "loss"), ...names];
}

/** Adds the forward pass and the loss; `named` maps tensor names to names in this graph. */
function addForward(g: Graph, head: Head, backend: Backend, named: (name: string) => string) {
  const { sizes, activation, loss, batch } = head.settings;
  const [x, target] = batchSpecs(head, backend);
  const layers = head.layers.map((l) => ({ weight: named(l.weight), bias: named(l.bias) }));
  const stack = forward(g, named(x.name), layers, activation);
  const width = sizes.at(-1)!;
  const size = batch === undefined ? undefined : batch * width;
  const compared = { prediction: stack.output, target: named(target.name), width, size, backend };
  return { layers, stack, loss: addLoss(g, loss, compared, { loss: named("loss"), accuracy: named("accuracy") }) };
}

const identity = (name: string): string => name;
const fileName = (name: string, backend: Backend): string => `${name}${backend === "webgpu" ? ".webgpu" : ""}.onnx`;

function buildModel(
  g: Graph, role: ModelRole, target: string, file: string, inputs: readonly TensorSpec[], outputs: readonly TensorSpec[], steps = 1,
): Model {
  const bytes = model(g.bytes(file.replace(".onnx", ""), inputs, outputs), OPSET, IR_VERSION);
  return { bytes, spec: { role, target, steps_per_call: steps, file, inputs, outputs } };
}

function evalModel(head: Head, backend: Backend): Model {
  const g = new Graph();
  addForward(g, head, backend, identity);
  return buildModel(g, "eval", backend, fileName("eval_model", backend), [...batchSpecs(head, backend), ...parameters(head)], lossSpecs(head));
}

/** Returns the inputs and outputs of one step. */
function stepSpecs(head: Head, backend: Backend) {
  const controls = [spec("learning_rate", "float32", [1], "lr")];
  if (head.rule.usesStep) controls.push(spec("step", backend === "webgpu" ? "int32" : "int64", [1], "step"));
  const carried = [...parameters(head), ...head.state.map((s) => spec(s.name, "float32", s.shape, "state"))];
  const updated = carried.map((t) => ({ ...t, name: `${t.name}.out`, feeds: t.name }));
  return { batch: batchSpecs(head, backend), controls, carried, updated };
}

function addStep(g: Graph, head: Head, backend: Backend, named: (name: string) => string): void {
  const { layers, stack, loss } = addForward(g, head, backend, named);
  const gradients = backward(g, stack, layers, head.settings.activation, loss.backward());
  const all = head.weights.map(({ name, shape }) => {
    const state = head.rule.slots.map((slot) => `${name}.${slot}`);
    return {
      parameter: named(name), gradient: gradients.get(named(name))!, shape, newParameter: named(`${name}.out`),
      state: state.map(named), newState: state.map((s) => named(`${s}.out`)),
    };
  });
  const [lr, step] = [named("learning_rate"), named("step")];
  if (backend === "webgpu") updateConcatenated(g, head.rule, head.settings.optimizer, all, lr, step);
  else head.rule.update(g, all, lr, step);
}

function stepModel(head: Head, backend: Backend): Model {
  const g = new Graph();
  addStep(g, head, backend, identity);
  const { batch, controls, carried, updated } = stepSpecs(head, backend);
  return buildModel(g, "step", backend, fileName("step_model", backend), [...batch, ...controls, ...carried], [...lossSpecs(head), ...updated]);
}

/** Returns the multi-step model: a Scan whose body is one step. */
function multiStepModel(head: Head): Model {
  const { batch, controls, carried, updated } = stepSpecs(head, "wasm");
  const each = (name: string) => `each/${name}`;
  const inner = (t: TensorSpec) => ({ ...t, name: each(t.name) });
  const body = new Graph("each/");
  addStep(body, head, "wasm", each);
  const bodyBytes = body.bytes("each", [...carried, ...batch, ...controls].map(inner), [...updated, ...lossSpecs(head)].map(inner));
  const g = new Graph("steps/");
  const single = controls.map((c) => g.op("Unsqueeze", [c.name, g.list(1)]));
  const ends = updated.map((t) => (t.role === "state" ? `steps/${t.name}` : t.name));
  const scanned = [...batch.map((t) => t.name), ...single];
  g.add("Scan", [...carried.map((t) => t.name), ...scanned], [...ends, ...lossSpecs(head).map((t) => t.name)], {
    body: { graph: bodyBytes }, num_scan_inputs: scanned.length,
  });
  updated.forEach((t, i) => {
    if (ends[i] !== t.name) g.op("Shrink", [ends[i]!], { lambd: { float: TINY }, bias: { float: 0 } }, t.name);
  });
  const many = (t: TensorSpec) => ({ ...t, shape: t.role === "lr" || t.role === "step" ? [STEPS] : [STEPS, ...t.shape] });
  const inputs = [...batch.map(many), ...controls.map(many), ...carried];
  return buildModel(g, "step", "wasm", `step_model.x${STEPS}.onnx`, inputs, [...lossSpecs(head).map(many), ...updated], STEPS);
}

/** Returns the inference model and the location of each weight in its bytes. */
function inferenceModel(head: Head, values: ReadonlyMap<string, HostTensor>): { model: Model; locations: ReadonlyMap<string, Location> } {
  const g = new Graph();
  const [x] = batchSpecs(head, "wasm");
  forward(g, "x", head.layers, head.settings.activation, head.output);
  const outputs = [spec(head.output, "float32", [x.shape[0]!, head.settings.sizes.at(-1)!], "output")];
  const tensors = head.weights.map((w) => tensor(w.name, "float32", w.shape, toBytes(values.get(w.name)!)));
  const bytes = model(g.bytes("inference_model", [x], outputs, tensors), OPSET, IR_VERSION);
  // The weights are the last fields of the file, and the data is the last field of each weight.
  const locations = new Map<string, Location>();
  let end = bytes.length;
  for (let i = tensors.length - 1; i >= 0; i--) {
    const { name, shape } = head.weights[i]!;
    const nbytes = 4 * count(shape);
    locations.set(name, { file: INFERENCE, offset: end - nbytes, nbytes });
    end -= field(5, tensors[i]!).length;
  }
  return { model: { bytes, spec: { role: "infer", target: "cpu", steps_per_call: 1, file: INFERENCE, inputs: [x], outputs } }, locations };
}

function manifestOf(head: Head, models: readonly ModelSpec[], locations: ReadonlyMap<string, Location>): unknown {
  const { settings: { loss, batch }, rule, weights, state } = head;
  return {
    format: FORMAT, models, buffers: [], accumulate: 1, checkpoint: "checkpoint", weights: null, files: {},
    parameters: weights.map((w) => ({ ...w, dtype: "float32", aliases: [], locations: [locations.get(w.name)!] })),
    state: state.map((s) => ({ ...s, dtype: "float32", init: 0 })),
    optimizer: rule.settings,
    loss: { name: loss, output: "loss" },
    options: {
      clip: { norm: null, value: null }, dims: batch === undefined ? {} : { batch }, ema: null, loss_scale: null, mode: "train",
      opset: OPSET, precision: "float32", randomness: "portable", recompute: [], repairs: [], straight_through: false,
    },
  };
}
