/** Forward and backward pass of an MLP. */
import type { Graph } from "./graph.js";

export type Activation = "relu" | "tanh" | "sigmoid" | "gelu";

interface ActivationRule {
  readonly op: string;
  /** Returns the gradient of the input `x`, given the gradient of the output `y`. */
  backward(g: Graph, x: string, y: string, dy: string): string;
}

export const ACTIVATIONS: Readonly<Record<Activation, ActivationRule>> = {
  relu: {
    op: "Relu",
    backward: (g, _, y, dy) => g.op("Where", [g.op("Greater", [y, g.float(0)]), dy, g.float(0)]),
  },
  tanh: {
    op: "Tanh",
    backward: (g, _, y, dy) => g.op("Mul", [dy, g.op("Sub", [g.float(1), g.op("Mul", [y, y])])]),
  },
  sigmoid: {
    op: "Sigmoid",
    backward: (g, _, y, dy) => g.op("Mul", [dy, g.op("Mul", [y, g.op("Sub", [g.float(1), y])])]),
  },
  gelu: {
    op: "Gelu",
    // With z = x / sqrt(2): dy / 2 * (erf(z) + 1 + x * sqrt(2 / pi) * exp(-z^2)).
    backward: (g, x, _, dy) => {
      const z = g.op("Mul", [x, g.float(Math.SQRT1_2)]);
      const bell = g.op("Exp", [g.op("Sub", [g.float(Math.log(2 / Math.PI) / 2), g.op("Mul", [z, z])])]);
      const sum = g.op("Add", [g.op("Add", [g.op("Erf", [z]), g.float(1)]), g.op("Mul", [x, bell])]);
      return g.op("Mul", [g.op("Mul", [dy, g.float(0.5)]), sum]);
    },
  },
};

/** Names of the parameters of a layer. */
export interface Layer {
  readonly weight: string;
  readonly bias: string;
}

/** Values that the forward pass saves for the backward pass. */
export interface Stack {
  readonly output: string;
  /** For each layer: its input, and the input of the activation before it. */
  readonly carried: readonly { readonly input: string; readonly before: string }[];
}

/** Adds the layers with activations between them. */
export function forward(g: Graph, x: string, layers: readonly Layer[], activation: Activation, output?: string): Stack {
  const carried: { input: string; before: string }[] = [];
  let [value, before] = [x, ""];
  layers.forEach(({ weight, bias }, i) => {
    carried.push({ input: value, before });
    const last = i === layers.length - 1;
    before = g.op("Gemm", [value, weight, bias], { transB: 1 }, last ? output : undefined);
    value = last ? before : g.op(ACTIVATIONS[activation].op, [before]);
  });
  return { output: value, carried };
}

/** Adds the gradients of all parameters, given the gradient of the output; returns them by parameter name. */
export function backward(
  g: Graph, { carried }: Stack, layers: readonly Layer[], activation: Activation, gradient: string,
): Map<string, string> {
  const gradients = new Map<string, string>();
  let dy = gradient;
  for (let i = layers.length - 1; i >= 0; i--) {
    const { weight, bias } = layers[i]!;
    const { input, before } = carried[i]!;
    gradients.set(weight, g.op("Gemm", [dy, input], { transA: 1 }));
    gradients.set(bias, g.op("ReduceSum", [dy, g.list(0)], { keepdims: 0 }));
    if (i > 0) dy = ACTIVATIONS[activation].backward(g, before, input, g.op("Gemm", [dy, weight]));
  }
  return gradients;
}
