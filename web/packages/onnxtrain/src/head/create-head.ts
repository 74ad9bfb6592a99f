import { count, filled, toBytes, type HostTensor } from "../dtypes.js";
import { write } from "../json-text.js";
import { FORMAT, withoutHashes, type Location, type ModelRole, type ModelSpec, type Role, type TensorSpec } from "../manifest.js";
import { uniform } from "../random.js";
import { stateKey, writeCheckpoint } from "../safetensors.js";
import { sha256 } from "../sha256.js";
import { Graph } from "./graph.js";
import { updateJoined } from "./joined.js";
import { backward, forward, type Layer } from "./layers.js";
import { addLoss, type Spelling } from "./losses.js";
import { ruleOf, type Rule } from "./optimizers.js";
import { field, model, tensor } from "../protobuf.js";
import { settingsOf, type HeadOptions, type Settings } from "./settings.js";

const OPSET = 21;
const IR_VERSION = 10;
const STEPS = 8;
/** Up to so many bytes of parameters and state a call makes several steps on wasm. */
const SMALL = 20_000_000;
/** State below this becomes 0: processors are slow on the smallest numbers, and wasm cannot turn them off. */
const TINY = 1e-35;
const INFERENCE = "inference_model.onnx";

/** Everything that the models of one head have in common. */
interface Head {
  readonly settings: Settings;
  readonly rule: Rule;
  readonly layers: readonly Layer[];
  /** Names and sizes of weights, then of state. */
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
 * Makes the artifacts of a small net, a stack of linear layers, without Python and without a
 * network: files by name, which `Trainer.create` and Python's `Trainer` take.
 */
export async function createHead(options: HeadOptions): Promise<Map<string, Uint8Array>> {
  const head = headOf(settingsOf(options));
  const values = firstWeights(head);
  const inference = inferenceModel(head, values);
  const models = [
    evalModel(head, "wasm"), stepModel(head, "wasm"), ...(isSmall(head) ? [severalSteps(head)] : []), inference.model,
    evalModel(head, "webgpu"), stepModel(head, "webgpu"),
  ];
  const listed = await Promise.all(models.map(async (m) => ({ ...m.spec, sha256: await sha256(m.bytes) })));
  const text = write(manifestOf(head, listed, inference.places));
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

/** Draws weights as torch's `Linear` does: evenly, within one over the root of the number of inputs. */
function firstWeights({ settings: { sizes, seed }, weights }: Head): Map<string, HostTensor> {
  const next = uniform(seed);
  return new Map(weights.map(({ name, shape }, i) => {
    const bound = 1 / Math.sqrt(sizes[i >> 1]!);
    const data = Float32Array.from({ length: count(shape) }, () => (2 * next() - 1) * bound);
    return [name, { dtype: "float32", dims: shape, data }];
  }));
}

const isSmall = ({ weights, state }: Head): boolean => 4 * [...weights, ...state].reduce((n, t) => n + count(t.shape), 0) <= SMALL;

const spec = (name: string, dtype: string, shape: readonly (number | string)[], role: Role, feeds: string | null = null): TensorSpec =>
  ({ name, dtype, shape, role, feeds });

const parameters = ({ weights }: Head): TensorSpec[] => weights.map((w) => spec(w.name, "float32", w.shape, "parameter"));

/** Gives input and target of a batch. */
function batchOf({ settings: { sizes, loss, batch } }: Head, spelling: Spelling): [TensorSpec, TensorSpec] {
  const rows = batch ?? "batch";
  const x = spec("x", "float32", [rows, sizes[0]!], "input");
  if (loss !== "cross_entropy") return [x, spec("target", "float32", [rows, sizes.at(-1)!], "target")];
  return [x, spec("labels", spelling === "webgpu" ? "int32" : "int64", [rows], "target")];
}

function found({ settings: { loss } }: Head): TensorSpec[] {
  const names = loss === "cross_entropy" ? [spec("accuracy", "float32", [], "metric")] : [];
  return [spec("loss", "float32", [], "loss"), ...names];
}

/** Adds the layers and the loss; `named` says what inputs and outputs are called in this graph. */
function addForward(g: Graph, head: Head, spelling: Spelling, named: (name: string) => string) {
  const { sizes, activation, loss, batch } = head.settings;
  const [x, target] = batchOf(head, spelling);
  const layers = head.layers.map((l) => ({ weight: named(l.weight), bias: named(l.bias) }));
  const stack = forward(g, named(x.name), layers, activation);
  const width = sizes.at(-1)!;
  const size = batch === undefined ? undefined : batch * width;
  const compared = { prediction: stack.output, target: named(target.name), width, size, spelling };
  return { layers, stack, loss: addLoss(g, loss, compared, { loss: named("loss"), accuracy: named("accuracy") }) };
}

const same = (name: string): string => name;
const fileOf = (name: string, spelling: Spelling): string => `${name}${spelling === "webgpu" ? ".webgpu" : ""}.onnx`;

function finished(
  g: Graph, role: ModelRole, target: string, file: string, inputs: readonly TensorSpec[], outputs: readonly TensorSpec[], steps = 1,
): Model {
  const bytes = model(g.bytes(file.replace(".onnx", ""), inputs, outputs), OPSET, IR_VERSION);
  return { bytes, spec: { role, target, steps_per_call: steps, file, inputs, outputs } };
}

function evalModel(head: Head, spelling: Spelling): Model {
  const g = new Graph();
  addForward(g, head, spelling, same);
  return finished(g, "eval", spelling, fileOf("eval_model", spelling), [...batchOf(head, spelling), ...parameters(head)], found(head));
}

/** Gives the inputs and outputs of one step. */
function stepSpecs(head: Head, spelling: Spelling) {
  const controls = [spec("learning_rate", "float32", [1], "lr")];
  if (head.rule.usesStep) controls.push(spec("step", spelling === "webgpu" ? "int32" : "int64", [1], "step"));
  const kept = [...parameters(head), ...head.state.map((s) => spec(s.name, "float32", s.shape, "state"))];
  const renewed = kept.map((t) => ({ ...t, name: `${t.name}.out`, feeds: t.name }));
  return { batch: batchOf(head, spelling), controls, kept, renewed };
}

function addStep(g: Graph, head: Head, spelling: Spelling, named: (name: string) => string): void {
  const { layers, stack, loss } = addForward(g, head, spelling, named);
  const gradients = backward(g, stack, layers, head.settings.activation, loss.backward());
  const all = head.weights.map(({ name, shape }) => {
    const state = head.rule.slots.map((slot) => `${name}.${slot}`);
    return {
      parameter: named(name), gradient: gradients.get(named(name))!, shape, newParameter: named(`${name}.out`),
      state: state.map(named), newState: state.map((s) => named(`${s}.out`)),
    };
  });
  const [lr, step] = [named("learning_rate"), named("step")];
  if (spelling === "webgpu") updateJoined(g, head.rule, head.settings.optimizer, all, lr, step);
  else head.rule.update(g, all, lr, step);
}

function stepModel(head: Head, spelling: Spelling): Model {
  const g = new Graph();
  addStep(g, head, spelling, same);
  const { batch, controls, kept, renewed } = stepSpecs(head, spelling);
  return finished(g, "step", spelling, fileOf("step_model", spelling), [...batch, ...controls, ...kept], [...found(head), ...renewed]);
}

/** Several steps in one call: the step is the body of a Scan. */
function severalSteps(head: Head): Model {
  const { batch, controls, kept, renewed } = stepSpecs(head, "wasm");
  const each = (name: string) => `each/${name}`;
  const inner = (t: TensorSpec) => ({ ...t, name: each(t.name) });
  const body = new Graph("each/");
  addStep(body, head, "wasm", each);
  const bodyBytes = body.bytes("each", [...kept, ...batch, ...controls].map(inner), [...renewed, ...found(head)].map(inner));
  const g = new Graph("steps/");
  const single = controls.map((c) => g.op("Unsqueeze", [c.name, g.list(1)]));
  const ends = renewed.map((t) => (t.role === "state" ? `steps/${t.name}` : t.name));
  const scanned = [...batch.map((t) => t.name), ...single];
  g.add("Scan", [...kept.map((t) => t.name), ...scanned], [...ends, ...found(head).map((t) => t.name)], {
    body: { graph: bodyBytes }, num_scan_inputs: scanned.length,
  });
  renewed.forEach((t, i) => {
    if (ends[i] !== t.name) g.op("Shrink", [ends[i]!], { lambd: { float: TINY }, bias: { float: 0 } }, t.name);
  });
  const many = (t: TensorSpec) => ({ ...t, shape: t.role === "lr" || t.role === "step" ? [STEPS] : [STEPS, ...t.shape] });
  const inputs = [...batch.map(many), ...controls.map(many), ...kept];
  return finished(g, "step", "wasm", `step_model.x${STEPS}.onnx`, inputs, [...found(head).map(many), ...renewed], STEPS);
}

/** Gives the plain model, and where the bytes of each weight lie in it. */
function inferenceModel(head: Head, values: ReadonlyMap<string, HostTensor>): { model: Model; places: ReadonlyMap<string, Location> } {
  const g = new Graph();
  const [x] = batchOf(head, "wasm");
  forward(g, "x", head.layers, head.settings.activation, head.output);
  const outputs = [spec(head.output, "float32", [x.shape[0]!, head.settings.sizes.at(-1)!], "output")];
  const tensors = head.weights.map((w) => tensor(w.name, "float32", w.shape, toBytes(values.get(w.name)!)));
  const bytes = model(g.bytes("inference_model", [x], outputs, tensors), OPSET, IR_VERSION);
  // Weights are the end of the file, and their numbers the end of each weight.
  const places = new Map<string, Location>();
  let end = bytes.length;
  for (let i = tensors.length - 1; i >= 0; i--) {
    const { name, shape } = head.weights[i]!;
    const nbytes = 4 * count(shape);
    places.set(name, { file: INFERENCE, offset: end - nbytes, nbytes });
    end -= field(5, tensors[i]!).length;
  }
  return { model: { bytes, spec: { role: "infer", target: "cpu", steps_per_call: 1, file: INFERENCE, inputs: [x], outputs } }, places };
}

function manifestOf(head: Head, models: readonly ModelSpec[], places: ReadonlyMap<string, Location>): unknown {
  const { settings: { loss, batch }, rule, weights, state } = head;
  return {
    format: FORMAT, models, buffers: [], accumulate: 1, checkpoint: "checkpoint", weights: null, files: {},
    parameters: weights.map((w) => ({ ...w, dtype: "float32", aliases: [], locations: [places.get(w.name)!] })),
    state: state.map((s) => ({ ...s, dtype: "float32", init: 0 })),
    optimizer: rule.settings,
    loss: { name: loss, output: "loss" },
    options: {
      clip: { norm: null, value: null }, dims: batch === undefined ? {} : { batch }, ema: null, loss_scale: null, mode: "train",
      opset: OPSET, precision: "float32", randomness: "portable", recompute: [], repairs: [], straight_through: false,
    },
  };
}
