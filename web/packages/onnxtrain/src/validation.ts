import { type Dataset, isColumns } from "./data.js";
import { decode, type HostTensor } from "./dtypes.js";
import type { Tensors } from "./engine.js";
import { NonFiniteError, OnnxTrainError, ShapeError } from "./errors.js";
import { type Batch, feed } from "./feeds.js";
import { type Manifest, type ModelSpec, ofRole, type TensorSpec } from "./manifest.js";
import type { FitOptions } from "./trainer.js";

/** Losses whose labels are class indices. */
const CLASSES = ["cross_entropy", "nll", "multi_margin", "focal", "dice"];
/** Default `ignore_index` of these losses. */
const IGNORE_INDEX = -100n;

/** Returns the target with class labels and the number of classes, if it follows from the model's outputs. */
export function classLabels(manifest: Manifest, spec: ModelSpec): { labels: TensorSpec; classes: number } | undefined {
  if (!CLASSES.includes(manifest.loss.name)) return undefined;
  const outputs = ofRole(manifest.models.find((m) => m.role === "infer")?.outputs ?? [], "output");
  for (const labels of ofRole(spec.inputs, "target").filter((t) => t.dtype.includes("int"))) {
    // The logits have the shape of the labels plus one axis: the classes.
    const counts = outputs.flatMap(({ shape }) =>
      shape.filter((n, axis) => typeof n === "number" && shape.filter((_, i) => i !== axis).join() === labels.shape.join()),
    );
    if (new Set(counts).size === 1) return { labels, classes: Number(counts[0]) };
  }
  return undefined;
}

/** Returns the error for the first label that is not a class index; `undefined` if all are valid. */
export function labelError(name: string, classes: number, { data, dims }: HostTensor): ShapeError | undefined {
  const values = Array.from(data as ArrayLike<number | bigint>, BigInt);
  // Labels that are too large come first: a negative one may be an ignore_index that the loss was built with.
  const large = values.findIndex((v) => v >= BigInt(classes));
  const at = large >= 0 ? large : values.findIndex((v) => v < 0n && v !== IGNORE_INDEX);
  if (at < 0) return undefined;
  const row = dims.length ? Math.floor(at / (values.length / dims[0]!)) : 0;
  return new ShapeError(`'${name}' must be class indices in [0, ${classes}), got ${values[at]} at row ${row}`);
}

/** Throws if BatchNormalization would see one value per channel; the manifest lists these sizes in `above_one`. */
export function checkBatchSize(manifest: Manifest, specs: readonly TensorSpec[], batch: Tensors): void {
  const products = manifest.options["above_one"];
  if (!Array.isArray(products)) return;
  const sizes = new Map(specs.flatMap((s) => s.shape.map((dim, axis) => [String(dim), batch.get(s.name)?.dims[axis]])));
  for (const names of products.map((p) => String(p).split("*"))) {
    if (names.some((n) => sizes.get(n) !== 1)) continue;
    throw new ShapeError(
      `BatchNormalization needs more than one value per channel in training, got ${names.map((n) => `${n} = 1`).join(" and ")}\n` +
        "hint: use a larger batchSize, set dropLast: true if it is the last batch of an epoch, or build with --mode as-is",
    );
  }
}

/** Throws if a label is not a class index; does nothing if the number of classes is not known (see `classLabels`). */
export function checkLabels(manifest: Manifest, rows: Batch): void {
  const spec = manifest.models.find((m) => m.role === "step" || m.role === "train");
  const known = spec && classLabels(manifest, spec);
  if (!known) return;
  const { labels: { name }, labels, classes } = known;
  if (rows[name] === undefined) return;
  const error = labelError(name, classes, feed([labels], { [name]: rows[name] }).get(name)!);
  if (error) throw error;
}

const formatNonFinite = (v: number): string => (Number.isNaN(v) ? "nan" : v > 0 ? "inf" : "-inf");

/** Describes a tensor with values that are not finite (dtype, shape, counts); `undefined` if all values are finite. */
function notFinite({ dtype, dims, data }: HostTensor): string | undefined {
  if (!dtype.includes("float")) return undefined;
  let [nans, infinities] = [0, 0];
  for (const raw of data as Float32Array) {
    const v = data instanceof Uint16Array ? decode(dtype, raw) : raw;
    if (Number.isNaN(v)) nans++;
    else if (!Number.isFinite(v)) infinities++;
  }
  return nans + infinities ? `${dtype}[${dims.join(", ")}], ${nans} NaN, ${infinities} infinite` : undefined;
}

/** Returns the error for a loss that is not finite, naming the first tensor with such values; `where` names the batch. */
export function nonFiniteLossError(
  loss: number, step: number, where: string, batch: Tensors, weights: Tensors, outputs: Tensors,
): NonFiniteError {
  const named = [
    ...[...batch].map(([n, t]) => [`'${n}' of the batch`, t] as const),
    ...[...weights].map(([n, t]) => [`parameter '${n}'`, t] as const),
    ...[...outputs].map(([n, t]) => [`output '${n}'`, t] as const),
  ];
  let first = "the loss itself";
  for (const [name, t] of named) {
    const what = notFinite(t);
    if (what === undefined) continue;
    first = `${name} (${what})`;
    break;
  }
  return new NonFiniteError(
    `the loss of step ${step} is ${formatNonFinite(loss)} (${where})\n  first tensor that is not finite: ${first}\n` +
      "hint: the weights are unchanged since the previous step; check the batch or lower the learning rate",
  );
}

const invalid = (what: string, expected: string, value: unknown): OnnxTrainError =>
  new OnnxTrainError(`${what} must be ${expected}, got ${typeof value === "number" ? value : (JSON.stringify(value) ?? typeof value)}`);

/** Validates the options of `fit` and the labels before training starts. */
export function checkFit(manifest: Manifest, data: Dataset, options: FitOptions): void {
  for (const name of ["epochs", "batchSize", "stepsPerCall"] as const) {
    const value: unknown = options[name];
    if (value !== undefined && !(Number.isSafeInteger(value) && (value as number) >= 1)) {
      throw invalid(`'${name}'`, "a positive integer", value);
    }
  }
  if (isColumns(data)) checkLabels(manifest, data);
}

/** Returns the learning rate if it is a finite number >= 0; throws otherwise. */
export function checkedRate(value: unknown): number {
  if (typeof value === "number" && value >= 0 && Number.isFinite(value)) return value;
  throw invalid("the learning rate", "a number >= 0", value);
}
