/** Updates of parameters, in the operators and the arithmetic of Python's artifacts. */
import type { Graph } from "./graph.js";

/** Settings with the names and defaults of `torch.optim`. */
export interface HeadOptimizer {
  /** `"adamw"` unless given. */
  readonly name?: "adamw" | "adam" | "sgd";
  readonly lr?: number;
  readonly weightDecay?: number;
  /** Of AdamW and Adam. */
  readonly betas?: readonly [number, number];
  readonly eps?: number;
  /** Of SGD. */
  readonly momentum?: number;
  readonly nesterov?: boolean;
}

/** Names of one parameter's values: the parameter, its gradient, and each state tensor before and after. */
export interface Values {
  readonly parameter: string;
  readonly gradient: string;
  readonly shape: readonly number[];
  readonly state: readonly string[];
  readonly newParameter: string;
  readonly newState: readonly string[];
}

export interface Rule {
  /** Of the state tensors of a parameter. */
  readonly slots: readonly string[];
  readonly usesStep: boolean;
  /** As the manifest has them. */
  readonly settings: Readonly<Record<string, unknown>> & { readonly lr: number };
  /** Adds the updates of all parameters; `lr` and `step` are tensors of one element. */
  update(g: Graph, all: readonly Values[], lr: string, step: string): void;
}

/** Gives the rule for settings that are right. */
export const ruleOf = (settings: Required<HeadOptimizer>): Rule => (settings.name === "sgd" ? sgd(settings) : adam(settings));

function sgd({ lr, weightDecay, momentum, nesterov }: Required<HeadOptimizer>): Rule {
  return {
    slots: momentum ? ["momentum_buffer"] : [],
    usesStep: false,
    settings: { name: "SGD", dampening: 0, groups: [], lr, momentum, nesterov, weight_decay: weightDecay },
    update(g, all, lrInput) {
      const rate = g.op("Reshape", [lrInput, g.list()]);
      for (const { parameter, gradient, state, newParameter, newState } of all) {
        const slope = decayed(g, gradient, parameter, weightDecay);
        const scaled = (v: string) => g.op("Mul", [v, g.float(momentum)]);
        let step = slope;
        if (momentum) {
          step = g.op("Add", [scaled(state[0]!), slope], {}, newState[0]!);
          if (nesterov) step = g.op("Add", [slope, scaled(step)]);
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
        const slope = decoupled ? gradient : decayed(g, gradient, parameter, weightDecay);
        const average = mean(state[0]!, slope, betas[0], newState[0]!);
        const square = mean(state[1]!, g.op("Mul", [slope, slope]), betas[1], newState[1]!);
        const change = g.op("Div", [average, g.op("Add", [g.op("Sqrt", [square]), small])]);
        const start = keep ? g.op("Mul", [parameter, keep]) : parameter;
        g.op("Sub", [start, g.op("Mul", [change, factor])], {}, newParameter);
      }
    },
  };
}

/** Gives 1 - beta^time, without the digits that a difference loses: 2 tanh(u) / (1 + tanh(u)), u = -time log(beta) / 2. */
function correction(g: Graph, beta: number, time: string): string {
  const t = g.op("Tanh", [g.op("Mul", [time, g.float(-Math.log(beta) / 2)])]);
  return g.op("Div", [g.op("Mul", [t, g.float(2)]), g.op("Add", [t, g.float(1)])]);
}
