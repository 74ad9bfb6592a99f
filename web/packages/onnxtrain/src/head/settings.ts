/** What a head is asked to be, checked and complete. */
import { OnnxTrainError } from "../errors.js";
import { ACTIVATIONS, type Activation } from "./layers.js";
import type { HeadLoss } from "./losses.js";
import type { HeadOptimizer } from "./optimizers.js";

/** What `createHead` makes. */
export interface HeadOptions {
  /** Numbers in a row of the input, such as those of an embedding. */
  readonly inputs: number;
  /** Classes to tell apart. */
  readonly classes?: number;
  /** In place of `classes`: numbers to predict; the loss is then `"mse"` unless given. */
  readonly outputs?: number;
  /** Sizes of hidden layers; none unless given. */
  readonly hidden?: readonly number[];
  /** Between layers; `"relu"` unless given. */
  readonly activation?: Activation;
  readonly loss?: HeadLoss;
  /** A name or settings; AdamW with a rate of 0.001 unless given. */
  readonly optimizer?: HeadOptimizer | NonNullable<HeadOptimizer["name"]>;
  /** Of the first weights: the same seed gives the same bits everywhere. 0 unless given. */
  readonly seed?: number;
  /** Rows of every batch, where they are always as many; any number unless given. */
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
/** Elements of one weight: what a tensor of a browser can hold. */
const LIMIT = 2 ** 28;

const refuse = (what: string, expected: string, value: unknown): never => {
  throw new OnnxTrainError(`createHead: '${what}' must be ${expected}, got ${value === undefined ? "nothing" : show(value)}`);
};
const show = (value: unknown): string =>
  typeof value === "number" || typeof value === "bigint" ? String(value) : (JSON.stringify(value) ?? typeof value);
const isWhole = (v: unknown, least: number): v is number => Number.isSafeInteger(v) && (v as number) >= least;

function whole(what: string, value: unknown, least = 1): number {
  return isWhole(value, least) ? value : refuse(what, `a whole number from ${least} on`, value);
}

function number(what: string, value: unknown, below = Infinity): number {
  const fits = typeof value === "number" && value >= 0 && value < below;
  return fits ? value : refuse(what, below === Infinity ? "a number from 0 on" : `a number from 0 to below ${below}`, value);
}

function oneOf<T extends string>(what: string, value: unknown, words: readonly string[]): T {
  return words.includes(value as string) ? (value as T) : refuse(what, `one of ${words.join(", ")}`, value);
}

function known(what: string, given: object, names: readonly string[]): void {
  const other = Object.keys(given).find((k) => !names.includes(k));
  if (other !== undefined) throw new OnnxTrainError(`createHead: ${what} has no '${other}'\nhint: it has ${names.join(", ")}`);
}

function optimizerOf(given: HeadOptions["optimizer"]): Required<HeadOptimizer> {
  const settings: HeadOptimizer = typeof given === "string" ? { name: given } : (given ?? {});
  if (typeof settings !== "object") refuse("optimizer", "a name or settings", given);
  const name = oneOf<"adamw" | "adam" | "sgd">("optimizer", settings.name ?? "adamw", Object.keys(OPTIMIZERS));
  known(`optimizer '${name}'`, settings, ["name", ...OPTIMIZERS[name]!]);
  const { lr = 1e-3, betas = [0.9, 0.999], eps = 1e-8, momentum = 0, nesterov = false } = settings;
  if (!Array.isArray(betas) || betas.length !== 2) refuse("optimizer.betas", "two numbers", betas);
  if (nesterov && !momentum) refuse("optimizer.momentum", "above 0 with nesterov", momentum);
  return {
    name, nesterov,
    lr: number("optimizer.lr", lr),
    weightDecay: number("optimizer.weightDecay", settings.weightDecay ?? (name === "adamw" ? 0.01 : 0)),
    betas: [number("optimizer.betas", betas[0], 1), number("optimizer.betas", betas[1], 1)],
    eps: number("optimizer.eps", eps),
    momentum: number("optimizer.momentum", momentum),
  };
}

/** Gives complete settings; refuses what cannot be, by its name. */
export function settingsOf(options: HeadOptions): Settings {
  known("it", options, OPTIONS);
  const { classes, outputs, hidden = [], batch } = options;
  if ((classes === undefined) === (outputs === undefined)) {
    throw new OnnxTrainError("createHead: give either 'classes' or 'outputs'");
  }
  const loss = oneOf<HeadLoss>("loss", options.loss ?? (classes === undefined ? "mse" : "cross_entropy"), LOSSES);
  if (!Array.isArray(hidden)) refuse("hidden", "a list of sizes", hidden);
  const last = classes === undefined ? whole("outputs", outputs) : whole("classes", classes);
  if (loss === "cross_entropy" && last < 2) refuse(classes === undefined ? "outputs" : "classes", "2 or more with cross_entropy", last);
  const sizes = [whole("inputs", options.inputs), ...hidden.map((n, i) => whole(`hidden[${i}]`, n)), last];
  sizes.slice(1).forEach((n, i) => {
    if (n * sizes[i]! > LIMIT) throw new OnnxTrainError(`createHead: a layer of ${sizes[i]} by ${n} is too large for a tab`);
  });
  return {
    sizes, loss,
    activation: oneOf<Activation>("activation", options.activation ?? "relu", Object.keys(ACTIVATIONS)),
    optimizer: optimizerOf(options.optimizer),
    seed: whole("seed", options.seed ?? 0, 0),
    batch: batch === undefined ? undefined : whole("batch", batch),
  };
}
