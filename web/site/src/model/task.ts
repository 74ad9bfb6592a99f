/** What was given: a model, or the wish for one, and rows for it. */
import { Artifacts, checkLabels, createHead, Trainer, type TensorSpec } from "onnxtrain";
import { columnsFor, rowsOf, shuffled, type Columns, type Fitted, type Table } from "./columns.js";
import { headFor } from "./head.js";

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

/** Gives the tensors of a batch. */
export function batchSpecs({ manifest: { models } }: Artifacts): TensorSpec[] {
  const spec = models.find((m) => m.role === "step" && m.steps_per_call === 1) ?? models.find((m) => m.role === "train")!;
  return spec.inputs.filter((t) => t.role === "input" || t.role === "target");
}

/** Gives a short name for a text, the same for the same text (FNV-1a). */
function fingerprint(words: string): string {
  let hash = 0x811c9dc5;
  for (let i = 0; i < words.length; i++) hash = Math.imul(hash ^ words.charCodeAt(i), 0x01000193);
  return (hash >>> 0).toString(16);
}

/** Gives a task for a model of the person's. */
export const taskFor = (artifacts: Artifacts, table: Table): Task => task(artifacts, columnsFor(batchSpecs(artifacts), table), table.name, false);

/** Gives a task with a net that is made for the table. */
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

/** Gives the error of a run in words about the file: the rows of a run are in another order. */
export function explained(error: Error, { artifacts, fitted, file }: Task): Error {
  try {
    if (error.name === "ShapeError") checkLabels(artifacts.manifest, fitted.columns);
    return error;
  } catch (better) {
    return new Error(`${file}: ${(better as Error).message}`);
  }
}

export const rowCount = (columns: Columns): number => Object.values(columns)[0]!.dims[0]!;
