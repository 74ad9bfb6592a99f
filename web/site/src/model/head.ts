/** What `createHead` is asked for where the person has a table and no model. */
import type { HeadOptions } from "onnxtrain";
import { numbered, type Cells, type Fitted, type Table } from "./columns.js";

/** As many different values as a class may have; more of them are numbers to predict. */
const CLASSES = 20;
const TARGETS = /^(labels?|class(es)?|target|y|kind|species|category|type)$/i;

export type Columns = Extract<Table, { kind: "columns" }>;

/** Gives the column that is most likely to be learned. */
export const likelyTarget = ({ columns }: Columns): string =>
  [...columns.keys()].find((n) => TARGETS.test(n)) ?? [...columns].find(([, cells]) => Array.isArray(cells))?.[0] ?? [...columns.keys()].at(-1)!;

const isKind = (cells: Cells): boolean =>
  Array.isArray(cells) || (new Set(cells).size <= CLASSES && cells.every((v) => Number.isInteger(v)));

/** Gives columns of numbers that are not the target. */
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

