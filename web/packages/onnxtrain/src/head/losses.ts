/** Losses of heads with their gradients, in the operators that Python's artifacts have for a target. */
import type { Graph } from "./graph.js";

export type HeadLoss = "cross_entropy" | "bce_with_logits" | "mse" | "l1" | "huber";
export type Spelling = "wasm" | "webgpu";

/** What a loss is computed from. */
export interface Compared {
  readonly prediction: string;
  readonly target: string;
  /** Classes, or numbers of a row. */
  readonly width: number;
  /** How many numbers a batch has, where that is fixed. */
  readonly size: number | undefined;
  readonly spelling: Spelling;
}

export interface Computed {
  readonly accuracy?: string;
  /** Adds the gradient of the prediction. */
  backward(): string;
}

/** Adds a loss under the name `loss`, and the accuracy where there are classes. */
export function addLoss(g: Graph, name: HeadLoss, of: Compared, names: { loss: string; accuracy: string }): Computed {
  if (name === "cross_entropy") return (of.spelling === "webgpu" ? onGpu : onCpu)(g, of, names);
  const { terms, backward } = TERMS[name](g, of);
  g.op("ReduceMean", [terms], { keepdims: 0 }, names.loss);
  return { backward: () => backward(share(g, of, terms)) };
}

/** Gives 1 / the number of terms that the loss is the mean of. */
function share(g: Graph, { size }: Compared, terms: string): string {
  if (size !== undefined) return g.float(1 / size);
  return g.op("Div", [g.float(1), g.op("Cast", [g.op("Size", [terms])], { to: 1 })]);
}

interface Terms {
  readonly terms: string;
  /** Gives the gradient of the prediction, given that of each term. */
  backward(each: string): string;
}

const TERMS: Readonly<Record<Exclude<HeadLoss, "cross_entropy">, (g: Graph, of: Compared) => Terms>> = {
  mse: (g, { prediction, target }) => {
    const d = g.op("Sub", [prediction, target]);
    return { terms: g.op("Mul", [d, d]), backward: (each) => g.op("Mul", [g.op("Mul", [each, g.float(2)]), d]) };
  },
  l1: (g, of) => {
    const d = g.op("Sub", [of.prediction, of.target]);
    return { terms: g.op("Abs", [d]), backward: (each) => g.op("Mul", [each, sign(g, d, of.spelling)]) };
  },
  huber: (g, of) => {
    // With c = min(|d|, 1) it is c * (|d| - c / 2), and its gradient is c * sign(d).
    const d = g.op("Sub", [of.prediction, of.target]);
    const size = g.op("Abs", [d]);
    const cut = g.op("Clip", [size, "", g.float(1)]);
    const terms = g.op("Mul", [cut, g.op("Sub", [size, g.op("Mul", [cut, g.float(0.5)])])]);
    return { terms, backward: (each) => g.op("Mul", [g.op("Mul", [each, cut]), sign(g, d, of.spelling)]) };
  },
  bce_with_logits: (g, { prediction, target }) => {
    // (1 - t) x + log(1 + exp(-x)), where nothing exponentiates a positive number.
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

/** Gives -1, 0 or 1; WebGPU has no kernel for Sign. */
function sign(g: Graph, d: string, spelling: Spelling): string {
  if (spelling === "wasm") return g.op("Sign", [d]);
  const below = g.op("Where", [g.op("Less", [d, g.float(0)]), g.float(-1), g.float(0)]);
  return g.op("Where", [g.op("Greater", [d, g.float(0)]), g.float(1), below]);
}

/** Labels that do not count. */
const IGNORED = -100;
/** Labels below 0 become this: no class, and so an error of the runtime, as those above are. */
const NO_CLASS = 2 ** 31 - 1;

function onCpu(g: Graph, { prediction, target }: Compared, names: { loss: string; accuracy: string }): Computed {
  const ignored = g.op("Equal", [target, g.whole(IGNORED)]);
  const low = g.op("Where", [ignored, g.whole(0), g.whole(NO_CLASS)]);
  const index = g.op("Unsqueeze", [g.op("Where", [g.op("Less", [target, g.whole(0)]), low, target]), g.list(1)]);
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

/** Without the operators that WebGPU has no kernel for, and in few: labels are compared with every class, and count where they are one. */
function onGpu(g: Graph, { prediction, target, width }: Compared, names: { loss: string; accuracy: string }): Computed {
  const top = g.op("ReduceMax", [prediction, g.list(1)], { keepdims: 1 });
  const shifted = g.op("Sub", [prediction, g.op("Ceil", [top])]);
  const log = g.op("Sub", [shifted, g.op("ReduceLogSumExp", [shifted, g.list(1)], { keepdims: 1 })]);
  const labels = g.op("Unsqueeze", [target, g.list(1)]);
  const isLabel = g.op("Equal", [labels, g.classes(width, "int32")]);
  const pick = (value: string) => g.op("Where", [isLabel, value, g.float(0)]);
  const total = g.op("ReduceSum", [pick(g.float(-1))], { keepdims: 0 });
  g.op("Div", [g.op("ReduceSum", [pick(log)], { keepdims: 0 }), total], {}, names.loss);
  // The first class of those with the largest score; it is never a label that does not count.
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
