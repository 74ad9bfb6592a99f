/**
 * Updates of many parameters as one, in the operators that Python's artifacts have for WebGPU: where each
 * operator is a kernel that has to be started, joining and parting vectors is quicker than an update of each.
 */
import { count } from "../dtypes.js";
import type { Graph } from "./graph.js";
import type { HeadOptimizer, Rule, Values } from "./optimizers.js";

/** Numbers of a parameter that is joined, and of what is joined at most; as in Python. */
const PARAMETER = 2 ** 18;
const TOGETHER = 2 ** 22;
/** Of one Split: WebGPU grants every kernel eight buffers. */
const RESULTS = 7;
/** The hyperbolic tangent of this is 1. */
const FAR = 50;

interface Member {
  readonly name: string;
  readonly shape: readonly number[];
}

/** Adds the updates of all parameters, small ones joined to vectors. */
export function updateJoined(g: Graph, rule: Rule, settings: Required<HeadOptimizer>, all: readonly Values[], lr: string, step: string): void {
  const packs = packed(all);
  const joined = new Set(packs.flat());
  const alone = all.filter((v) => !joined.has(v));
  if (packs.length && isPlainAdam(settings)) {
    if (alone.length) rule.update(g, alone, lr, step);
    const biases = corrections(g, settings.betas, step);
    for (const pack of packs) adamRows(g, settings, pack, lr, biases);
    return;
  }
  const vectors = packs.map((pack) => vectorOf(g, pack));
  rule.update(g, [...alone, ...vectors], lr, step);
  packs.forEach((pack, i) => {
    part(g, vectors[i]!.newParameter, pack.map((v) => ({ name: v.newParameter, shape: v.shape })));
    vectors[i]!.newState.forEach((vector, slot) => part(g, vector, pack.map((v) => ({ name: v.newState[slot]!, shape: v.shape }))));
  });
}

const isPlainAdam = ({ name, weightDecay, betas }: Required<HeadOptimizer>): boolean =>
  (name === "adamw" || (name === "adam" && !weightDecay)) && betas.every((b) => b !== 0);

/** Gives what is joined: parameters in their order, up to a size. */
function packed(all: readonly Values[]): Values[][] {
  const packs: Values[][] = [[]];
  let total = 0;
  for (const value of all) {
    const size = count(value.shape);
    if (size > PARAMETER) continue;
    if (packs.at(-1)!.length && total + size > TOGETHER) {
      packs.push([]);
      total = 0;
    }
    packs.at(-1)!.push(value);
    total += size;
  }
  return packs.filter((p) => p.length > 1);
}

const flat = (g: Graph, { name, shape }: Member): string => (shape.length === 1 ? name : g.op("Reshape", [name, g.list(-1)]));

const join = (g: Graph, members: readonly Member[]): string => g.op("Concat", members.map((m) => flat(g, m)), { axis: 0 });

/** Gives a pack as one parameter. */
function vectorOf(g: Graph, pack: readonly Values[]): Values {
  const of = (name: (v: Values) => string) => join(g, pack.map((v) => ({ name: name(v), shape: v.shape })));
  const { state, newParameter, newState } = pack[0]!;
  return {
    parameter: of((v) => v.parameter), gradient: of((v) => v.gradient), shape: [pack.reduce((n, v) => n + count(v.shape), 0)],
    state: state.map((_, slot) => of((v) => v.state[slot]!)),
    newParameter: `joined/${newParameter}`, newState: newState.map((n) => `joined/${n}`),
  };
}

/** Parts a vector, a few members at a time; `rest` elements follow that nobody wants. */
function part(g: Graph, vector: string, members: readonly Member[], rest = 0): void {
  let each = 1;
  while (each * (RESULTS - (rest ? 1 : 0)) < members.length) each *= RESULTS;
  const pieces = Array.from({ length: Math.ceil(members.length / each) }, (_, i) => members.slice(i * each, (i + 1) * each));
  const sizes = pieces.map((piece) => piece.reduce((n, m) => n + count(m.shape), 0));
  const named = (piece: readonly Member[]) => (piece.length === 1 && piece[0]!.shape.length === 1 ? piece[0]!.name : `part/${piece[0]!.name}/${piece.length}`);
  const outputs = pieces.map(named);
  g.add("Split", [vector, g.list(...sizes, ...(rest ? [rest] : []))], [...outputs, ...(rest ? [`rest/${vector}`] : [])], { axis: 0 });
  pieces.forEach((piece, i) => {
    const [first] = piece as [Member];
    if (piece.length > 1) part(g, outputs[i]!, piece);
    else if (first.shape.length !== 1) g.op("Reshape", [outputs[i]!, g.list(...first.shape)], {}, first.name);
  });
}

/**
 * Adds Adam for a pack: the rows m, v, p, g, g * g times a matrix of constants are the new m and v, and p with its decay.
 */
function adamRows(g: Graph, { betas: [b1, b2], eps, weightDecay }: Required<HeadOptimizer>, pack: readonly Values[], lr: string, biases: string): void {
  const members = (name: (v: Values) => string) => pack.map((v) => ({ name: name(v), shape: v.shape }));
  const size = pack.reduce((n, v) => n + count(v.shape), 0);
  const slope = join(g, members((v) => v.gradient));
  const moments = [0, 1].flatMap((slot) => members((v) => v.state[slot]!));
  const own = [slope, g.op("Mul", [slope, slope])].map((name) => ({ name, shape: [size] }));
  const rows = g.op("Reshape", [join(g, [...moments, ...members((v) => v.parameter), ...own]), g.list(5, size)]);
  const mixing = g.floats([4, 5], [b1, 0, 0, 1 - b1, 0, 0, b2, 0, 0, 1 - b2, 0, 0, weightDecay, 0, 0, 0, 0, 1, 0, 0]);
  const mixed = g.op("MatMul", [mixing, rows]);
  const even = g.op("Reshape", [g.op("Div", [mixed, biases]), g.list(-1)]);
  const [m, v, decay, p] = ["m", "v", "decay", "p"].map((n) => `${n}/${pack[0]!.newParameter}`) as [string, string, string, string];
  g.add("Split", [even, g.list(size, size, size, size)], [m, v, decay, p], { axis: 0 });
  let change = g.op("Div", [m, g.op("Add", [g.op("Sqrt", [v]), g.float(eps)])]);
  if (weightDecay) change = g.op("Add", [change, decay]);
  part(g, g.op("Sub", [p, g.op("Mul", [change, lr])]), members((v) => v.newParameter));
  part(g, g.op("Reshape", [mixed, g.list(-1)]), [0, 1].flatMap((slot) => members((v) => v.newState[slot]!)), 2 * size);
}

/** Gives 1 - beta^step of both averages, without cancellation, and 1 twice: with t = tanh(-step ln(beta) / 2) it is t / (t / 2 + 1 / 2). */
function corrections(g: Graph, [b1, b2]: readonly [number, number], step: string): string {
  const halves = g.floats([4, 1], [-Math.log(b1) / 2, -Math.log(b2) / 2, FAR, FAR]);
  const t = g.op("Tanh", [g.op("Mul", [g.op("Cast", [step], { to: 1 }), halves])]);
  return g.op("Div", [t, g.op("HardSigmoid", [t], { alpha: { float: 0.5 }, beta: { float: 0.5 } })]);
}
