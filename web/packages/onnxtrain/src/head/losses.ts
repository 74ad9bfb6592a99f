/** Losses and their gradients, with the same operators as artifacts that are built in Python for wasm and WebGPU. */
import type { Graph } from "./graph.js";

export type HeadLoss = "cross_entropy" | "bce_with_logits" | "mse" | "l1" | "huber";
export type Backend = "wasm" | "webgpu";

/** Inputs of a loss. */
export interface LossInputs {
  readonly prediction: string;
  readonly target: string;
  /** Number of classes or outputs. */
  readonly width: number;
  /** Number of elements of a batch, if it is fixed. */
  readonly size: number | undefined;
  readonly backend: Backend;
}

export interface LossOutputs {
  readonly accuracy?: string;
  /** Adds the gradient of the prediction and returns its name. */
  backward(): string;
}

/** Adds a loss, and the accuracy for classification. */
export function addLoss(g: Graph, name: HeadLoss, of: LossInputs, names: { loss: string; accuracy: string }): LossOutputs {
  if (name === "cross_entropy") return (of.backend === "webgpu" ? crossEntropyWebGpu : crossEntropyWasm)(g, of, names);
  const { terms, backward } = TERMS[name](g, of);
  g.op("ReduceMean", [terms], { keepdims: 0 }, names.loss);
  return { backward: () => backward(meanFactor(g, of, terms)) };
}

/** Returns 1 / n for a mean over n terms. */
function meanFactor(g: Graph, { size }: LossInputs, terms: string): string {
  if (size !== undefined) return g.float(1 / size);
  return g.op("Div", [g.float(1), g.op("Cast", [g.op("Size", [terms])], { to: 1 })]);
}

interface ElementwiseLoss {
  readonly terms: string;
  /** Returns the gradient of the prediction, given the gradient of each term. */
  backward(each: string): string;
}

const TERMS: Readonly<Record<Exclude<HeadLoss, "cross_entropy">, (g: Graph, of: LossInputs) => ElementwiseLoss>> = {
  mse: (g, { prediction, target }) => {
    const d = g.op("Sub", [prediction, target]);
    return { terms: g.op("Mul", [d, d]), backward: (each) => g.op("Mul", [g.op("Mul", [each, g.float(2)]), d]) };
  },
  l1: (g, of) => {
    const d = g.op("Sub", [of.prediction, of.target]);
    return { terms: g.op("Abs", [d]), backward: (each) => g.op("Mul", [each, sign(g, d, of.backend)]) };
  },
  huber: (g, of) => {
    // With c = min(|d|, 1) the loss is c * (|d| - c / 2) and its gradient c * sign(d).
    const d = g.op("Sub", [of.prediction, of.target]);
    const size = g.op("Abs", [d]);
    const cut = g.op("Clip", [size, "", g.float(1)]);
    const terms = g.op("Mul", [cut, g.op("Sub", [size, g.op("Mul", [cut, g.float(0.5)])])]);
    return { terms, backward: (each) => g.op("Mul", [g.op("Mul", [each, cut]), sign(g, d, of.backend)]) };
  },
  bce_with_logits: (g, { prediction, target }) => {
    // (1 - t) x + log(1 + exp(-x)), without exp of a positive number, which could overflow.
    const negative = g.op("Neg", [prediction]);
    const rest = g.op("Sub", [g.float(1), target]);
    const log = g.op("Log", [g.op("Add", [g.op("Exp", [g.op("Neg", [g.op("Abs", [prediction])])]), g.float(1)])]);
    const soft = g.op("Add", [g.op("Relu", [negative]), log]);
    const terms = g.op("Add", [g.op("Mul", [rest, prediction]), soft]);
    const backward = (each: string) =>
      g.op("Sub", [g.op("Mul", [each, rest]), g.op("Mul", [each, g.op("Sigmoid", [negative])])]);
    return { terms, backward };
  },
};

/** Returns the sign of `d`; WebGPU has no kernel for Sign. */
function sign(g: Graph, d: string, backend: Backend): string {
  if (backend === "wasm") return g.op("Sign", [d]);
  const below = g.op("Where", [g.op("Less", [d, g.float(0)]), g.float(-1), g.float(0)]);
  return g.op("Where", [g.op("Greater", [d, g.float(0)]), g.float(1), below]);
}

/** Labels with this value are ignored. */
const IGNORE_INDEX = -100;
/** Other negative labels are mapped to this value, which makes the runtime fail as it does for labels that are too large. */
const INVALID_LABEL = 2 ** 31 - 1;

function crossEntropyWasm(g: Graph, { prediction, target }: LossInputs, names: { loss: string; accuracy: string }): LossOutputs {
  const ignored = g.op("Equal", [target, g.integer(IGNORE_INDEX)]);
  const low = g.op("Where", [ignored, g.integer(0), g.integer(INVALID_LABEL)]);
  const index = g.op("Unsqueeze", [g.op("Where", [g.op("Less", [target, g.integer(0)]), low, target]), g.list(1)]);
  const log = g.op("LogSoftmax", [prediction], { axis: 1 });
  const picked = g.op("Neg", [g.op("Squeeze", [g.op("GatherElements", [log, index], { axis: 1 }), g.list(1)])]);
  const counts = g.op("Where", [ignored, g.float(0), g.float(1)]);
  const total = g.op("ReduceSum", [counts], { keepdims: 0 });
  const sum = g.op("ReduceSum", [g.op("Where", [ignored, g.float(0), picked])], { keepdims: 0 });
  g.op("Div", [sum, total], {}, names.loss);
  const guess = g.op("ArgMax", [prediction], { axis: 1, keepdims: 0 });
  addAccuracy(g, g.op("Equal", [guess, target]), counts, total, names.accuracy);
  const backward = () => {
    const parts = g.op("Exp", [log]);
    const some = g.op("Where", [g.op("Equal", [total, g.float(0)]), g.float(1), total]);
    const each = g.op("Mul", [g.op("Div", [g.float(1), some]), counts]);
    const own = g.op("Sub", [g.op("GatherElements", [parts, index], { axis: 1 }), g.float(1)]);
    const all = g.op("ScatterElements", [parts, index, own], { axis: 1 });
    return g.op("Mul", [all, g.op("Unsqueeze", [each, g.list(1)])]);
  };
  return { accuracy: names.accuracy, backward };
}

/** Cross entropy with few nodes that all have WebGPU kernels: compares labels with every class instead of gathering. */
function crossEntropyWebGpu(g: Graph, { prediction, target, width }: LossInputs, names: { loss: string; accuracy: string }): LossOutputs {
  const top = g.op("ReduceMax", [prediction, g.list(1)], { keepdims: 1 });
  const shifted = g.op("Sub", [prediction, g.op("Ceil", [top])]);
  const log = g.op("Sub", [shifted, g.op("ReduceLogSumExp", [shifted, g.list(1)], { keepdims: 1 })]);
  const labels = g.op("Unsqueeze", [target, g.list(1)]);
  const isLabel = g.op("Equal", [labels, g.classes(width, "int32")]);
  const pick = (value: string) => g.op("Where", [isLabel, value, g.float(0)]);
  const total = g.op("ReduceSum", [pick(g.float(-1))], { keepdims: 0 });
  g.op("Div", [g.op("ReduceSum", [pick(log)], { keepdims: 0 }), total], {}, names.loss);
  // The first class with the largest logit; never an ignored label.
  const place = g.op("Where", [g.op("Equal", [prediction, top]), g.classes(width, "float32"), g.float(width)]);
  const guess = g.op("ReduceMin", [place, g.list(1)], { keepdims: 1 });
  const right = g.op("Equal", [guess, g.op("Cast", [labels], { to: 1 })]);
  const hits = g.op("ReduceSum", [g.op("Where", [right, g.float(-1), g.float(0)])], { keepdims: 0 });
  g.op("Div", [hits, total], {}, names.accuracy);
  const backward = () => {
    const each = pick(g.op("Div", [g.float(1), total]));
    const row = g.op("ReduceSum", [each, g.list(1)], { keepdims: 1 });
    return g.op("Sub", [each, g.op("Mul", [row, g.op("Exp", [log])])]);
  };
  return { accuracy: names.accuracy, backward };
}

function addAccuracy(g: Graph, right: string, counts: string, total: string, name: string): void {
  const hits = g.op("Mul", [g.op("Cast", [right], { to: 1 }), counts]);
  g.op("Div", [g.op("ReduceSum", [hits], { keepdims: 0 }), total], {}, name);
}
