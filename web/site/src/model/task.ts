import { Artifacts, checkLabels, createHead, type HeadOptions, type TensorSpec, Trainer } from "onnxtrain";
import { type Cells, type Columns, columnsFor, type Fitted, encodeLabels, rowsOf, shuffleRows, type Table } from "./columns.js";

/** Integer targets with at most this many distinct values are classes; others are regression targets. */
const MAX_CLASSES = 20;
const TARGETS = /^(labels?|class(es)?|target|y|kind|species|category|type)$/i;

export type ColumnTable = Extract<Table, { kind: "columns" }>;

/** Returns the most likely target column. */
export const likelyTarget = ({ columns }: ColumnTable): string =>
  [...columns.keys()].find((n) => TARGETS.test(n)) ?? [...columns].find(([, cells]) => Array.isArray(cells))?.[0] ?? [...columns.keys()].at(-1)!;

const isCategorical = (cells: Cells): boolean =>
  Array.isArray(cells) || (new Set(cells).size <= MAX_CLASSES && cells.every((v) => Number.isInteger(v)));

/** Returns the numeric columns except the target. */
const features = ({ columns }: ColumnTable, target: string) =>
  [...columns].filter((entry): entry is [string, Float64Array] => entry[0] !== target && !Array.isArray(entry[1]));

/** Returns the options of `createHead` and the inputs for a table. */
export function headFor(table: ColumnTable, target: string, hidden: readonly number[]): { options: HeadOptions; fitted: Fitted; about: string } {
  const inputs = features(table, target);
  if (!inputs.length) throw new Error(`${table.name}: no numeric column except '${target}'`);
  const cells = table.columns.get(target)!;
  const rows = cells.length;
  const x = new Float64Array(rows * inputs.length);
  inputs.forEach(([, values], c) => values.forEach((v, r) => (x[r * inputs.length + c] = v)));
  const column = { data: x, dims: [rows, inputs.length], dtype: "float64" };
  const named = `${inputs.length} features (${inputs.slice(0, 4).map(([n]) => n).join(", ")}${inputs.length > 4 ? ", ..." : ""})`;
  if (!isCategorical(cells)) {
    const data = Float64Array.from(cells as Float64Array);
    const fitted = { columns: { x: column, target: { data, dims: [rows, 1], dtype: "float64" } }, labelNames: new Map<string, string[]>() };
    return { options: { inputs: inputs.length, outputs: 1, hidden }, fitted, about: `Regression of '${target}' from ${named}.` };
  }
  const { data, names } = encodeLabels(Array.from(cells as ArrayLike<string | number>, String));
  if (names.length < 2) throw new Error(`${table.name}: all rows have the same '${target}'`);
  const fitted = { columns: { x: column, labels: { data, dims: [rows], dtype: "float64" } }, labelNames: new Map([["labels", names]]) };
  return {
    options: { inputs: inputs.length, classes: names.length, hidden }, fitted,
    about: `Classification of '${target}' from ${named}: ${names.slice(0, 6).join(", ")}${names.length > 6 ? ", ..." : ""}.`,
  };
}

/** A model with training and test rows. */
export interface Task {
  readonly artifacts: Artifacts;
  readonly train: Columns;
  readonly test: Columns;
  readonly fitted: Fitted;
  readonly file: string;
  /** Name of its checkpoints, unique for each model. */
  readonly slot: string;
  /** Whether the page built the model. */
  readonly generated: boolean;
}

/** Returns the inputs and targets of a batch. */
export function batchSpecs({ manifest: { models } }: Artifacts): TensorSpec[] {
  const spec = models.find((m) => m.role === "step" && m.steps_per_call === 1) ?? models.find((m) => m.role === "train")!;
  return spec.inputs.filter((t) => t.role === "input" || t.role === "target");
}

/** Returns the FNV-1a hash of a text. */
function fingerprint(text: string): string {
  let hash = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 0x01000193);
  return (hash >>> 0).toString(16);
}

/** Creates a task for the user's model. */
export const taskFor = (artifacts: Artifacts, table: Table): Task => task(artifacts, columnsFor(batchSpecs(artifacts), table), table.name, false);

/** Creates a task with an MLP for the table. */
export async function taskWithHead(table: Table, target: string, hidden: readonly number[]): Promise<Task & { about: string }> {
  if (table.kind !== "columns") throw new Error(`${table.name}: an MLP needs columns of numbers; add an artifact directory to train on arrays`);
  const { options, fitted, about } = headFor(table, target, hidden);
  return { ...task(await Artifacts.load(await createHead(options)), fitted, table.name, true), about };
}

function task(artifacts: Artifacts, fitted: Fitted, file: string, generated: boolean): Task {
  const mixed = shuffleRows(fitted.columns);
  const count = Object.values(mixed)[0]!.dims[0]!;
  if (count < 2) throw new Error(`${file}: at least 2 rows are needed to train and test, got ${count}`);
  const split = count - Math.max(1, Math.floor(count / 5));
  return {
    artifacts, fitted, file, generated, train: rowsOf(mixed, 0, split), test: rowsOf(mixed, split, count),
    slot: `own-${fingerprint(artifacts.text)}`,
  };
}

export const open = ({ artifacts }: Task, device: "wasm" | "webgpu", onMessage: (message: string) => void): Promise<Trainer> =>
  Trainer.create({ artifacts, device, onMessage });

/** Reports label errors with row numbers of the file, because the rows of a run are shuffled. */
export function explained(error: Error, { artifacts, fitted, file }: Task): Error {
  try {
    if (error.name === "ShapeError") checkLabels(artifacts.manifest, fitted.columns);
    return error;
  } catch (better) {
    return new Error(`${file}: ${(better as Error).message}`);
  }
}

export const rowCount = (columns: Columns): number => Object.values(columns)[0]!.dims[0]!;
