import { ManifestError, ShapeError } from "./errors.js";
import { compact } from "./json-text.js";

/** The manifest format that this package reads. */
export const FORMAT = 1;

export const ROLES = [
  "input", "target", "parameter", "frozen", "buffer", "gradient", "accumulator", "state",
  "lr", "step", "rng", "grad_scale", "reset", "scalar", "loss", "metric", "output",
] as const;
/** The last three are for trainers that bind their own memory, such as Python's; this package does not run them. */
export const MODEL_ROLES = [
  "train", "eval", "optimizer", "step", "infer", "gradients", "scalars", "update",
] as const;

export type Role = (typeof ROLES)[number];
export type ModelRole = (typeof MODEL_ROLES)[number];

/** An input or output of a model. */
export interface TensorSpec {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly (number | string)[];
  readonly role: Role;
  /** For outputs: the input that receives this value in the next call. */
  readonly feeds: string | null;
}

/** One model file. */
export interface ModelSpec {
  readonly role: ModelRole;
  readonly target: string;
  readonly steps_per_call: number;
  readonly file: string;
  readonly sha256: string;
  readonly inputs: readonly TensorSpec[];
  readonly outputs: readonly TensorSpec[];
  /** For updates of concatenated parameters: their names. */
  readonly members?: readonly string[];
  /** Inputs whose buffer the output that feeds them may share. */
  readonly in_place?: readonly string[];
}

/** Location of the raw little-endian bytes of a tensor. */
export interface Location {
  readonly file: string;
  readonly offset: number;
  readonly nbytes: number;
  /** Dtype of the stored bytes, if it differs from the tensor's. */
  readonly dtype?: string;
}

/** A parameter or buffer. */
export interface WeightSpec {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly aliases: readonly string[];
  readonly locations: readonly Location[];
}

/** One state tensor of the optimizer. */
export interface StateSpec {
  readonly name: string;
  readonly parameter: string;
  readonly slot: string;
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly init: number;
}

/** The contents of `manifest.json`: everything a trainer needs to know about a directory of artifacts. */
export interface Manifest {
  readonly format: number;
  readonly models: readonly ModelSpec[];
  readonly parameters: readonly WeightSpec[];
  readonly buffers: readonly WeightSpec[];
  readonly state: readonly StateSpec[];
  readonly optimizer: { readonly name: string; readonly lr: number; readonly [key: string]: unknown };
  readonly loss: { readonly name: string; readonly output: string; readonly [key: string]: unknown };
  readonly accumulate: number;
  readonly options: Readonly<Record<string, unknown>>;
  readonly checkpoint: string;
  readonly weights: string | null;
  readonly files: Readonly<Record<string, string>>;
}

type Check = (value: unknown, where: string) => void;

const fail = (where: string, expected: string, value: unknown): never => {
  const got = value === undefined ? "nothing" : JSON.stringify(value)?.slice(0, 60);
  throw new ManifestError(`${where}: expected ${expected}, got ${got}`);
};
const want = (test: (v: unknown) => boolean, expected: string): Check => (v, where) => {
  if (!test(v)) fail(where, expected, v);
};
const isObject = (v: unknown): v is Record<string, unknown> =>
  typeof v === "object" && v !== null && !Array.isArray(v);
const isSize = (v: unknown): v is number => Number.isSafeInteger(v) && (v as number) >= 0;

const text = want((v) => typeof v === "string" && v !== "", "a name");
const size = want(isSize, "an integer >= 0");
const positive = want((v) => isSize(v) && v > 0, "a positive integer");
const number = want((v) => typeof v === "number", "a number");
const plainObject = want(isObject, "an object");
const digest = want((v) => typeof v === "string" && /^([0-9a-f]{64})?$/.test(v), "a sha256");
const file = want(
  (v) => typeof v === "string" && v !== "" && v === v.trim() && !/[/\\]/.test(v) && v !== "." && v !== "..",
  "a plain file name",
);
const oneOf = (...words: readonly string[]) =>
  want((v) => words.includes(v as string), `one of ${words.join(", ")}`);
const orNull = (check: Check): Check => (v, where) => {
  if (v !== null) check(v, where);
};
const list = (check: Check): Check => (v, where) => {
  if (!Array.isArray(v)) return void fail(where, "a list", v);
  v.forEach((item, i) => check(item, `${where}[${i}]`));
};
const record = (fields: Record<string, Check>, optional: Record<string, Check> = {}): Check => (v, where) => {
  if (!isObject(v)) return void fail(where, "an object", v);
  const unknown = Object.keys(v).filter((k) => !Object.hasOwn(fields, k) && !Object.hasOwn(optional, k));
  if (unknown.length) throw new ManifestError(`${where}: unknown entries: ${unknown.join(", ")}`);
  for (const name of Object.keys(fields)) {
    if (!Object.hasOwn(v, name)) throw new ManifestError(`${where}: '${name}' is missing`);
  }
  for (const [name, check] of Object.entries({ ...fields, ...optional })) {
    if (Object.hasOwn(v, name)) check(v[name], `${where}: ${name}`);
  }
};

const tensor = record({
  name: text, dtype: text, role: oneOf(...ROLES), feeds: orNull(text),
  shape: list(want((v) => isSize(v) || (typeof v === "string" && v !== ""), "a size or a symbol")),
});
const weight = record({
  name: text, dtype: text, shape: list(size), aliases: list(text),
  locations: list(record({ file, offset: size, nbytes: size }, { dtype: text })),
});
const MANIFEST = record({
  format: size,
  models: list(record({
    role: oneOf(...MODEL_ROLES), target: text, steps_per_call: positive, file, sha256: digest,
    inputs: list(tensor), outputs: list(tensor),
  }, { members: list(text), in_place: list(text) })),
  parameters: list(weight),
  buffers: list(weight),
  state: list(record({
    name: text, parameter: text, slot: text, dtype: text, shape: list(size), init: number,
  })),
  optimizer: plainObject, loss: plainObject, accumulate: positive, options: plainObject,
  checkpoint: file, weights: orNull(file), files: plainObject,
});

/** Parses and validates a manifest; the error names the entry that is missing or invalid. */
export function parseManifest(source: string, label = "manifest.json"): Manifest {
  let data: unknown;
  try {
    data = JSON.parse(source);
  } catch (error) {
    throw new ManifestError(`${label}: not JSON: ${(error as Error).message}`);
  }
  if (!isObject(data)) throw new ManifestError(`${label}: not an object`);
  if (data["format"] !== FORMAT) {
    throw new ManifestError(
      `${label}: format ${JSON.stringify(data["format"])}, but this version reads format ${FORMAT}\n` +
        "hint: build the artifacts again, or install the version of onnxtrain that built them",
    );
  }
  MANIFEST(data, label);
  const manifest = data as unknown as Manifest;
  number(manifest.optimizer.lr, `${label}: optimizer: lr`);
  for (const [name, sum] of Object.entries(manifest.files)) {
    file(name, `${label}: files`);
    digest(sum, `${label}: files: ${name}`);
  }
  for (const model of manifest.models) {
    const inputs = new Set(model.inputs.map((t) => t.name));
    for (const t of model.outputs) {
      if (t.feeds !== null && !inputs.has(t.feeds)) {
        throw new ManifestError(`${label}: '${t.name}' feeds '${t.feeds}', which is not an input`);
      }
    }
  }
  return manifest;
}

/** Returns the manifest as stored in checkpoints: compact and without hashes. */
export const withoutHashes = (source: string): string =>
  compact(source)
    .replace(/"sha256":"[0-9a-f]{64}"/g, '"sha256":""')
    .replace(/"files":\{[^{}]*\}/, '"files":{}');

/** Returns the model with a role for the first of `targets` that the artifacts were built for. */
export function findModel(
  manifest: Manifest,
  role: ModelRole,
  targets: readonly string[],
  steps = 1,
): ModelSpec | undefined {
  const fitting = manifest.models.filter((m) => m.role === role && m.steps_per_call === steps);
  for (const target of targets) {
    const model = fitting.find((m) => m.target === target);
    if (model) return model;
  }
  return undefined;
}

/** Returns the tensors with one of the given roles, in order. */
export const ofRole = (specs: readonly TensorSpec[], ...roles: readonly Role[]): TensorSpec[] =>
  specs.filter((t) => roles.includes(t.role));

/** Returns the parameter or buffer with a name or alias. */
export function weightNamed(manifest: Manifest, name: string): WeightSpec {
  const weights = [...manifest.parameters, ...manifest.buffers];
  const named = weights.find((w) => w.name === name || w.aliases.includes(name));
  if (!named) throw new ShapeError(`unknown parameter: '${name}'\nhint: expected one of ${weights.map((w) => w.name).join(", ")}`);
  return named;
}
