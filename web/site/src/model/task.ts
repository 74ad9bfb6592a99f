import { Artifacts, checkLabels, createHead, type HeadOptions, type TensorSpec, Trainer } from "onnxtrain";
import { type Cells, type Columns, columnsFor, type Fitted, numbered, rowsOf, shuffled, type Table } from "./columns.js";

/** What `createHead` is asked for where the person has a table and no model. */

/** As many different values as a class may have; more of them are numbers to predict. */
const CLASSES = 20;
const TARGETS = /^(labels?|class(es)?|target|y|kind|species|category|type)$/i;

export type Columns = Extract<Table, { kind: "columns" }>;

/** Returns the column that is most likely to be learned. */
export const likelyTarget = ({ columns }: Columns): string =>
  [...columns.keys()].find((n) => TARGETS.test(n)) ?? [...columns].find(([, cells]) => Array.isArray(cells))?.[0] ?? [...columns.keys()].at(-1)!;

const isKind = (cells: Cells): boolean =>
  Array.isArray(cells) || (new Set(cells).size <= CLASSES && cells.every((v) => Number.isInteger(v)));

/** Returns columns of numbers that are not the target. */
const features = ({ columns }: Columns, target: string) =>
  [...columns].filter((entry): entry is [string, Float64Array] => entry[0] !== target && !Array.isArray(entry[1]));

/** Says what a net for the table is to be. */
export function headFor(table: Columns, target: string, hidden: readonly number[]): { options: HeadOptions; fitted: Fitted; about: string } {
  const inputs = features(table, target);
  if (!inputs.length) throw new Error(`${table.name}: no column of numbers besides '${target}'`);
  const cells = table.columns.get(target)!;
  const rows = cells.length;
  const x = new Float64Array(rows * inputs.length);
  inputs.forEach(([, values], c) => values.forEach((v, r) => (x[r * inputs.length + c] = v)));
  const column = { data: x, dims: [rows, inputs.length], dtype: "float64" };
  const named = `${inputs.length} numbers (${inputs.slice(0, 4).map(([n]) => n).join(", ")}${inputs.length > 4 ? ", ..." : ""})`;
  if (!isKind(cells)) {
    const data = Float64Array.from(cells as Float64Array);
    const fitted = { columns: { x: column, target: { data, dims: [rows, 1], dtype: "float64" } }, words: new Map<string, string[]>() };
    return { options: { inputs: inputs.length, outputs: 1, hidden }, fitted, about: `From ${named} it predicts '${target}'.` };
  }
  const { data, words } = numbered(Array.from(cells as ArrayLike<string | number>, String));
  if (words.length < 2) throw new Error(`${table.name}: all rows have the same '${target}'`);
  const fitted = { columns: { x: column, labels: { data, dims: [rows], dtype: "float64" } }, words: new Map([["labels", words]]) };
  return {
    options: { inputs: inputs.length, classes: words.length, hidden }, fitted,
    about: `From ${named} it tells which '${target}' a row is: ${words.slice(0, 6).join(", ")}${words.length > 6 ? ", ..." : ""}.`,
  };
}

/** What was given: a model, or the wish for one, and rows for it. */

/** A model and rows to train and test it with. */
export interface Task {
  readonly artifacts: Artifacts;
  readonly train: Columns;
  readonly test: Columns;
  readonly fitted: Fitted;
  readonly file: string;
  /** Under which its checkpoints are kept: other models have other names. */
  readonly slot: string;
  /** Whether the page made the model. */
  readonly made: boolean;
}

/** Returns the tensors of a batch. */
export function batchSpecs({ manifest: { models } }: Artifacts): TensorSpec[] {
  const spec = models.find((m) => m.role === "step" && m.steps_per_call === 1) ?? models.find((m) => m.role === "train")!;
  return spec.inputs.filter((t) => t.role === "input" || t.role === "target");
}

/** Returns a short name for a text, the same for the same text (FNV-1a). */
function fingerprint(words: string): string {
  let hash = 0x811c9dc5;
  for (let i = 0; i < words.length; i++) hash = Math.imul(hash ^ words.charCodeAt(i), 0x01000193);
  return (hash >>> 0).toString(16);
}

/** Returns a task for a model of the person's. */
export const taskFor = (artifacts: Artifacts, table: Table): Task => task(artifacts, columnsFor(batchSpecs(artifacts), table), table.name, false);

/** Returns a task with a net that is made for the table. */
export async function taskWithHead(table: Table, target: string, hidden: readonly number[]): Promise<Task & { about: string }> {
  if (table.kind !== "columns") throw new Error(`${table.name}: a net can be made for columns of numbers; for arrays give a folder of artifacts`);
  const { options, fitted, about } = headFor(table, target, hidden);
  return { ...task(await Artifacts.load(await createHead(options)), fitted, table.name, true), about };
}

function task(artifacts: Artifacts, fitted: Fitted, file: string, made: boolean): Task {
  const mixed = shuffled(fitted.columns);
  const count = Object.values(mixed)[0]!.dims[0]!;
  if (count < 2) throw new Error(`${file}: ${count} row is too few to train and test with`);
  const kept = count - Math.max(1, Math.floor(count / 5));
  return {
    artifacts, fitted, file, made, train: rowsOf(mixed, 0, kept), test: rowsOf(mixed, kept, count),
    slot: `own-${fingerprint(artifacts.text)}`,
  };
}

export const open = ({ artifacts }: Task, device: "wasm" | "webgpu", onMessage: (message: string) => void): Promise<Trainer> =>
  Trainer.create({ artifacts, device, onMessage });

/** Returns the error of a run in words about the file: the rows of a run are in another order. */
export function explained(error: Error, { artifacts, fitted, file }: Task): Error {
  try {
    if (error.name === "ShapeError") checkLabels(artifacts.manifest, fitted.columns);
    return error;
  } catch (better) {
    return new Error(`${file}: ${(better as Error).message}`);
  }
}

export const rowCount = (columns: Columns): number => Object.values(columns)[0]!.dims[0]!;
