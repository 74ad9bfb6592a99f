import type { Graph } from "./graph.js";
import { count } from "../dtypes.js";

/** Optimizer updates, with the same operators and rounding as artifacts that are built in Python. */

/** Optimizer options with the names and defaults of `torch.optim`. */
export interface HeadOptimizer {
  /** Default: `"adamw"`. */
  readonly name?: "adamw" | "adam" | "sgd";
  readonly lr?: number;
  readonly weightDecay?: number;
  /** AdamW and Adam. */
  readonly betas?: readonly [number, number];
  readonly eps?: number;
  /** SGD. */
  readonly momentum?: number;
  readonly nesterov?: boolean;
}

/** Value names of one parameter: the parameter, its gradient, and the state tensors before and after the update. */
export interface Values {
  readonly parameter: string;
  readonly gradient: string;
  readonly shape: readonly number[];
  readonly state: readonly string[];
  readonly newParameter: string;
  readonly newState: readonly string[];
}

export interface Rule {
  /** Names of the state tensors of a parameter. */
  readonly slots: readonly string[];
  readonly usesStep: boolean;
  /** The `optimizer` entry of the manifest. */
  readonly settings: Readonly<Record<string, unknown>> & { readonly lr: number };
  /** Adds the updates of all parameters; `lr` and `step` are names of tensors with one element. */
  update(g: Graph, all: readonly Values[], lr: string, step: string): void;
}

/** Returns the update rule of validated options. */
export const ruleOf = (settings: Required<HeadOptimizer>): Rule => (settings.name === "sgd" ? sgd(settings) : adam(settings));

function sgd({ lr, weightDecay, momentum, nesterov }: Required<HeadOptimizer>): Rule {
  return {
    slots: momentum ? ["momentum_buffer"] : [],
    usesStep: false,
    settings: { name: "SGD", dampening: 0, groups: [], lr, momentum, nesterov, weight_decay: weightDecay },
    update(g, all, lrInput) {
      const rate = g.op("Reshape", [lrInput, g.list()]);
      for (const { parameter, gradient, state, newParameter, newState } of all) {
        const grad = decayed(g, gradient, parameter, weightDecay);
        const scaled = (v: string) => g.op("Mul", [v, g.float(momentum)]);
        let step = grad;
        if (momentum) {
          step = g.op("Add", [scaled(state[0]!), grad], {}, newState[0]!);
          if (nesterov) step = g.op("Add", [grad, scaled(step)]);
        }
        g.op("Sub", [parameter, g.op("Mul", [step, rate])], {}, newParameter);
      }
    },
  };
}

const decayed = (g: Graph, gradient: string, parameter: string, decay: number): string =>
  decay ? g.op("Add", [gradient, g.op("Mul", [parameter, g.float(decay)])]) : gradient;

function adam({ name, lr, weightDecay, betas, eps }: Required<HeadOptimizer>): Rule {
  const decoupled = name === "adamw";
  const common = { amsgrad: false, betas: [...betas], eps, groups: [], lr, weight_decay: weightDecay };
  return {
    slots: ["exp_avg", "exp_avg_sq"],
    usesStep: true,
    settings: decoupled ? { name: "AdamW", correct_bias: true, form: "torch", ...common } : { name: "Adam", ...common },
    update(g, all, lrInput, step) {
      const rate = g.op("Reshape", [lrInput, g.list()]);
      const time = g.op("Cast", [g.op("Reshape", [step, g.list()])], { to: 1 });
      const [first, second] = betas.map((beta) => correction(g, beta, time));
      const root = g.op("Sqrt", [second!]);
      const small = g.op("Mul", [root, g.float(eps)]);
      const factor = g.op("Mul", [rate, g.op("Div", [root, first!])]);
      const keep = decoupled && weightDecay ? g.op("Sub", [g.float(1), g.op("Mul", [rate, g.float(weightDecay)])]) : undefined;
      const mean = (old: string, value: string, beta: number, result: string) =>
        g.op("Add", [g.op("Mul", [old, g.float(beta)]), g.op("Mul", [value, g.float(1 - beta)])], {}, result);
      for (const { parameter, gradient, state, newParameter, newState } of all) {
        const grad = decoupled ? gradient : decayed(g, gradient, parameter, weightDecay);
        const average = mean(state[0]!, grad, betas[0], newState[0]!);
        const square = mean(state[1]!, g.op("Mul", [grad, grad]), betas[1], newState[1]!);
        const change = g.op("Div", [average, g.op("Add", [g.op("Sqrt", [square]), small])]);
        const start = keep ? g.op("Mul", [parameter, keep]) : parameter;
        g.op("Sub", [start, g.op("Mul", [change, factor])], {}, newParameter);
      }
    },
  };
}

/** Returns the bias correction 1 - beta^time without cancellation: 2 tanh(u) / (1 + tanh(u)) with u = -time log(beta) / 2. */
function correction(g: Graph, beta: number, time: string): string {
  const t = g.op("Tanh", [g.op("Mul", [time, g.float(-Math.log(beta) / 2)])]);
  return g.op("Div", [g.op("Mul", [t, g.float(2)]), g.op("Add", [t, g.float(1)])]);
}

// Updates of concatenated parameters for WebGPU, as in artifacts that are built in Python: each node is a kernel launch,
// so concatenating and splitting vectors is faster than updating every parameter separately.

/** Maximum number of elements of a parameter that is concatenated, and of the whole vector; the same as in Python. */
const MAX_PARAMETER = 2 ** 18;
const MAX_VECTOR = 2 ** 22;
/** Maximum number of outputs of a Split: WebGPU guarantees eight storage buffers per kernel, one of which is the input. */
const MAX_SPLIT_OUTPUTS = 7;
/** tanh of this is exactly 1 in float32. */
const SATURATED = 50;

interface Member {
  readonly name: string;
  readonly shape: readonly number[];
}

/** Adds the updates of all parameters; small parameters are updated as concatenated vectors. */
export function updateConcatenated(g: Graph, rule: Rule, settings: Required<HeadOptimizer>, all: readonly Values[], lr: string, step: string): void {
  const packs = groupSmall(all);
  const inPacks = new Set(packs.flat());
  const separate = all.filter((v) => !inPacks.has(v));
  if (packs.length && isPlainAdam(settings)) {
    if (separate.length) rule.update(g, separate, lr, step);
    const biases = corrections(g, settings.betas, step);
    for (const pack of packs) adamRows(g, settings, pack, lr, biases);
    return;
  }
  const vectors = packs.map((pack) => vectorOf(g, pack));
  rule.update(g, [...separate, ...vectors], lr, step);
  packs.forEach((pack, i) => {
    split(g, vectors[i]!.newParameter, pack.map((v) => ({ name: v.newParameter, shape: v.shape })));
    vectors[i]!.newState.forEach((vector, slot) => split(g, vector, pack.map((v) => ({ name: v.newState[slot]!, shape: v.shape }))));
  });
}

const isPlainAdam = ({ name, weightDecay, betas }: Required<HeadOptimizer>): boolean =>
  (name === "adamw" || (name === "adam" && !weightDecay)) && betas.every((b) => b !== 0);

/** Groups small parameters, in order, into packs of limited size. */
function groupSmall(all: readonly Values[]): Values[][] {
  const packs: Values[][] = [[]];
  let total = 0;
  for (const value of all) {
    const size = count(value.shape);
    if (size > MAX_PARAMETER) continue;
    if (packs.at(-1)!.length && total + size > MAX_VECTOR) {
      packs.push([]);
      total = 0;
    }
    packs.at(-1)!.push(value);
    total += size;
  }
  return packs.filter((p) => p.length > 1);
}

const flat = (g: Graph, { name, shape }: Member): string => (shape.length === 1 ? name : g.op("Reshape", [name, g.list(-1)]));

const concatenate = (g: Graph, members: readonly Member[]): string => g.op("Concat", members.map((m) => flat(g, m)), { axis: 0 });

/** Concatenates the values of a pack to those of one parameter. */
function vectorOf(g: Graph, pack: readonly Values[]): Values {
  const of = (name: (v: Values) => string) => concatenate(g, pack.map((v) => ({ name: name(v), shape: v.shape })));
  const { state, newParameter, newState } = pack[0]!;
  return {
    parameter: of((v) => v.parameter), gradient: of((v) => v.gradient), shape: [pack.reduce((n, v) => n + count(v.shape), 0)],
    state: state.map((_, slot) => of((v) => v.state[slot]!)),
    newParameter: `joined/${newParameter}`, newState: newState.map((n) => `joined/${n}`),
  };
}

/** Splits a vector into its members with a tree of Split nodes; `rest` unused elements follow. */
function split(g: Graph, vector: string, members: readonly Member[], rest = 0): void {
  let each = 1;
  while (each * (MAX_SPLIT_OUTPUTS - (rest ? 1 : 0)) < members.length) each *= MAX_SPLIT_OUTPUTS;
  const groups = Array.from({ length: Math.ceil(members.length / each) }, (_, i) => members.slice(i * each, (i + 1) * each));
  const sizes = groups.map((group) => group.reduce((n, m) => n + count(m.shape), 0));
  const named = (group: readonly Member[]) => (group.length === 1 && group[0]!.shape.length === 1 ? group[0]!.name : `part/${group[0]!.name}/${group.length}`);
  const outputs = groups.map(named);
  g.add("Split", [vector, g.list(...sizes, ...(rest ? [rest] : []))], [...outputs, ...(rest ? [`rest/${vector}`] : [])], { axis: 0 });
  groups.forEach((group, i) => {
    const [first] = group as [Member];
    if (group.length > 1) split(g, outputs[i]!, group);
    else if (first.shape.length !== 1) g.op("Reshape", [outputs[i]!, g.list(...first.shape)], {}, first.name);
  });
}

/**
 * Adds Adam for a pack as one MatMul: a constant matrix times the rows m, v, p, g and g * g gives the new m and v, the
 * weight decay and p.
 */
function adamRows(g: Graph, { betas: [b1, b2], eps, weightDecay }: Required<HeadOptimizer>, pack: readonly Values[], lr: string, biases: string): void {
  const members = (name: (v: Values) => string) => pack.map((v) => ({ name: name(v), shape: v.shape }));
  const size = pack.reduce((n, v) => n + count(v.shape), 0);
  const grad = concatenate(g, members((v) => v.gradient));
  const moments = [0, 1].flatMap((slot) => members((v) => v.state[slot]!));
  const gradients = [grad, g.op("Mul", [grad, grad])].map((name) => ({ name, shape: [size] }));
  const rows = g.op("Reshape", [concatenate(g, [...moments, ...members((v) => v.parameter), ...gradients]), g.list(5, size)]);
  const mixing = g.floats([4, 5], [b1, 0, 0, 1 - b1, 0, 0, b2, 0, 0, 1 - b2, 0, 0, weightDecay, 0, 0, 0, 0, 1, 0, 0]);
  const mixed = g.op("MatMul", [mixing, rows]);
  const corrected = g.op("Reshape", [g.op("Div", [mixed, biases]), g.list(-1)]);
  const [m, v, decay, p] = ["m", "v", "decay", "p"].map((n) => `${n}/${pack[0]!.newParameter}`) as [string, string, string, string];
  g.add("Split", [corrected, g.list(size, size, size, size)], [m, v, decay, p], { axis: 0 });
  let change = g.op("Div", [m, g.op("Add", [g.op("Sqrt", [v]), g.float(eps)])]);
  if (weightDecay) change = g.op("Add", [change, decay]);
  split(g, g.op("Sub", [p, g.op("Mul", [change, lr])]), members((v) => v.newParameter));
  split(g, g.op("Reshape", [mixed, g.list(-1)]), [0, 1].flatMap((slot) => members((v) => v.newState[slot]!)), 2 * size);
}

/** Returns both bias corrections 1 - beta^step without cancellation, and 1 twice: t / (t / 2 + 1 / 2) with t = tanh(-step ln(beta) / 2). */
function corrections(g: Graph, [b1, b2]: readonly [number, number], step: string): string {
  const halves = g.floats([4, 1], [-Math.log(b1) / 2, -Math.log(b2) / 2, SATURATED, SATURATED]);
  const t = g.op("Tanh", [g.op("Mul", [g.op("Cast", [step], { to: 1 }), halves])]);
  return g.op("Div", [t, g.op("HardSigmoid", [t], { alpha: { float: 0.5 }, beta: { float: 0.5 } })]);
}
