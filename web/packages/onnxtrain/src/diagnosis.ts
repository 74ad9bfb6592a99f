/** Why a batch could not be trained on, in the words of the person who gave it. */
import { decode, type HostTensor } from "./dtypes.js";
import type { Tensors } from "./engine.js";
import { NonFiniteError, ShapeError } from "./errors.js";
import { feed, type Batch } from "./feeds.js";
import { ofRole, type Manifest, type ModelSpec, type TensorSpec } from "./manifest.js";

/** Losses whose labels are classes. */
const CLASSES = ["cross_entropy", "nll", "multi_margin"];
/** Labels that do not count, unless the loss was built with another number. */
const IGNORED = -100n;

/** Gives the target that holds classes and how many there are, where a model's outputs tell. */
export function classLabels(manifest: Manifest, spec: ModelSpec): { labels: TensorSpec; classes: number } | undefined {
  if (!CLASSES.includes(manifest.loss.name)) return undefined;
  const outputs = ofRole(manifest.models.find((m) => m.role === "infer")?.outputs ?? [], "output");
  for (const labels of ofRole(spec.inputs, "target").filter((t) => t.dtype.includes("int"))) {
    // The scores have the shape of the labels and one axis more, which counts the classes.
    const counts = outputs.flatMap(({ shape }) =>
      shape.filter((n, axis) => typeof n === "number" && shape.filter((_, i) => i !== axis).join() === labels.shape.join()),
    );
    if (new Set(counts).size === 1) return { labels, classes: Number(counts[0]) };
  }
  return undefined;
}

/** Gives the error for the first label that is no class; `undefined` if all are. */
export function badLabel(name: string, classes: number, { data, dims }: HostTensor): ShapeError | undefined {
  const values = Array.from(data as ArrayLike<number | bigint>, BigInt);
  // Too large a number is wrong for certain; a negative one may be the number that does not count.
  const large = values.findIndex((v) => v >= BigInt(classes));
  const at = large >= 0 ? large : values.findIndex((v) => v < 0n && v !== IGNORED);
  if (at < 0) return undefined;
  const row = dims.length ? Math.floor(at / (values.length / dims[0]!)) : 0;
  return new ShapeError(`'${name}' has ${values[at]} in row ${row}; the model has ${classes} classes: 0 to ${classes - 1}`);
}

/** Refuses a batch that leaves BatchNormalization one value per channel, as the manifest's `above_one` tells. */
export function checkBatchSize(manifest: Manifest, specs: readonly TensorSpec[], batch: Tensors): void {
  const products = manifest.options["above_one"];
  if (!Array.isArray(products)) return;
  const sizes = new Map(specs.flatMap((s) => s.shape.map((dim, axis) => [String(dim), batch.get(s.name)?.dims[axis]])));
  for (const names of products.map((p) => String(p).split("*"))) {
    if (names.some((n) => sizes.get(n) !== 1)) continue;
    throw new ShapeError(
      `${names.join(" and ")} of 1 leave BatchNormalization one value per channel; in training it needs more\n` +
        "hint: another batchSize, dropLast if it is the last batch of an epoch, or build(mode='as-is')",
    );
  }
}

/** Refuses rows with a label that is no class, by its value and row; `classLabels` says where that can be known. */
export function checkLabels(manifest: Manifest, rows: Batch): void {
  const spec = manifest.models.find((m) => m.role === "step" || m.role === "train");
  const known = spec && classLabels(manifest, spec);
  if (!known) return;
  const { labels: { name }, labels, classes } = known;
  if (rows[name] === undefined) return;
  const error = badLabel(name, classes, feed([labels], { [name]: rows[name] }).get(name)!);
  if (error) throw error;
}

const python = (v: number): string => (Number.isNaN(v) ? "nan" : v > 0 ? "inf" : "-inf");

/** Says what is not finite in a tensor, as its type, shape and counts; `undefined` if everything is. */
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

/** Gives the error for a loss that is not finite, with the first tensor that is to blame; `where` names the batch. */
export function badLoss(
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
    `the loss of step ${step} is ${python(loss)} (${where})\n  first tensor that is not finite: ${first}\n` +
      "hint: the weights are those before this step",
  );
}
