import type { TensorSpec, TypedArray } from "onnxtrain";

/** Numbers with a shape; the first axis counts rows. */
export interface Column {
  readonly data: TypedArray;
  readonly dims: readonly number[];
  readonly dtype: string;
}

/** A column of a table: numbers, or text where there is any. */
export type Cells = Float64Array | string[];

/** What a file holds: single columns, or arrays. */
export type Table =
  | { readonly kind: "columns"; readonly name: string; readonly columns: ReadonlyMap<string, Cells> }
  | { readonly kind: "arrays"; readonly name: string; readonly arrays: ReadonlyMap<string, Column | string[]> };

export type Columns = Record<string, Column>;

/** Numbers for a model, and for targets that were text, the text of each number. */
export interface Fitted {
  readonly columns: Columns;
  readonly words: ReadonlyMap<string, readonly string[]>;
}

const describe = (t: TensorSpec): string => `'${t.name}' (${t.dtype}[${t.shape.join(", ")}])`;
const wantsWhole = (t: TensorSpec): boolean => /int|bool/.test(t.dtype);

/** Numbers texts by their order in the alphabet. */
export function numbered(cells: readonly string[]): { data: Float64Array; words: string[] } {
  const words = [...new Set(cells)].sort();
  const places = new Map(words.map((w, i) => [w, i]));
  return { data: Float64Array.from(cells, (c) => places.get(c)!), words };
}

/** Returns each tensor that a model takes its numbers from a table; the error names the tensor and the column. */
export function columnsFor(specs: readonly TensorSpec[], table: Table): Fitted {
  const words = new Map<string, readonly string[]>();
  const columns = table.kind === "arrays" ? fromArrays(specs, table, words) : fromColumns(specs, table, words);
  let rows: [number, string] | undefined;
  for (const [name, { dims }] of Object.entries(columns)) {
    rows ??= [dims[0]!, name];
    if (dims[0] !== rows[0]) throw new Error(`${table.name}: '${name}' has ${dims[0]} rows, '${rows[1]}' has ${rows[0]}`);
  }
  return { columns, words };
}

type Words = Map<string, readonly string[]>;

function fromArrays(specs: readonly TensorSpec[], table: Extract<Table, { kind: "arrays" }>, words: Words): Columns {
  const there = [...table.arrays.keys()].join(", ") || "nothing";
  return Object.fromEntries(specs.map((t) => {
    const array = table.arrays.get(t.name);
    if (!array) throw new Error(`${table.name}: the model takes ${describe(t)}, the file has ${there}`);
    if (Array.isArray(array)) {
      if (!wantsWhole(t) || t.role !== "target" || t.shape.length !== 1) throw new Error(`${table.name}: '${t.name}' is text, the model takes ${describe(t)}`);
      const { data, words: own } = numbered(array);
      words.set(t.name, own);
      return [t.name, { data, dims: [data.length], dtype: "float64" }];
    }
    const fits = array.dims.length === t.shape.length && t.shape.every((d, i) => typeof d === "string" || d === array.dims[i]);
    if (!fits) throw new Error(`${table.name}: the model takes ${describe(t)}, the array has shape [${array.dims.join(", ")}]`);
    return [t.name, array];
  }));
}

/** Says which columns of a table belong to which tensor. */
function assigned(specs: readonly TensorSpec[], names: Iterable<string>): Map<string, string[]> {
  const left = new Set(names);
  const taken = new Map<string, string[]>();
  for (const t of specs) {
    // A column of the tensor's name, or numbered ones: x.0, x.1, ...
    const own = [...left].filter((n) => n.startsWith(t.name) && /^[._[ ]?\d+\]?$/.test(n.slice(t.name.length)));
    const all = left.has(t.name) ? [t.name] : own;
    all.forEach((n) => left.delete(n));
    taken.set(t.name, all);
  }
  // What no name belongs to goes, in its order, to the only tensor without columns.
  const open = specs.filter((t) => taken.get(t.name)!.length === 0);
  if (open.length === 1) taken.set(open[0]!.name, [...left]);
  return taken;
}

function fromColumns(specs: readonly TensorSpec[], table: Extract<Table, { kind: "columns" }>, words: Words): Columns {
  const taken = assigned(specs, table.columns.keys());
  return Object.fromEntries(specs.map((t) => {
    const names = taken.get(t.name)!;
    if (!names.length) {
      throw new Error(`${table.name}: the model takes ${describe(t)}, no column is called '${t.name}' or '${t.name}.0'; there are ${[...table.columns.keys()].slice(0, 12).join(", ")}`);
    }
    const tail = t.shape.slice(1).map((d) => (typeof d === "number" ? d : names.length));
    const width = tail.reduce((a, b) => a * b, 1);
    if (width !== names.length) {
      throw new Error(`${table.name}: the model takes ${describe(t)}, which is ${width} columns; there ${names.length === 1 ? "is" : "are"} ${names.length}: ${names.slice(0, 8).join(", ")}${names.length > 8 ? ", ..." : ""}`);
    }
    return [t.name, joined(t, names, table, width, tail, words)];
  }));
}

function joined(t: TensorSpec, names: string[], table: Extract<Table, { kind: "columns" }>, width: number, tail: number[], words: Words): Column {
  const parts = names.map((name) => {
    const cells = table.columns.get(name)!;
    if (!Array.isArray(cells)) return cells;
    if (t.role === "target" && wantsWhole(t) && width === 1) {
      const own = numbered(cells);
      words.set(t.name, own.words);
      return own.data;
    }
    const line = cells.findIndex((c) => Number.isNaN(Number(c)));
    throw new Error(`${table.name}: column '${name}', line ${line + 2}: '${cells[line]}' is not a number`);
  });
  const rows = parts[0]!.length;
  const data = new Float64Array(rows * width);
  parts.forEach((part, c) => part.forEach((v, r) => (data[r * width + c] = v)));
  // Whole numbers stay whole: numbers with a fraction are refused for a label, and named.
  if (wantsWhole(t)) {
    const odd = data.findIndex((v) => !Number.isInteger(v));
    if (odd >= 0) throw new Error(`${table.name}: column '${names[odd % width]}', line ${Math.floor(odd / width) + 2}: ${data[odd]} is no whole number, ${describe(t)} takes those`);
  }
  return { data, dims: [rows, ...tail], dtype: "float64" };
}

/** Returns rows `from` to `to` of every column. */
export function rowsOf(columns: Columns, from: number, to: number): Columns {
  return Object.fromEntries(Object.entries(columns).map(([name, c]) => {
    const width = c.dims.slice(1).reduce((a, b) => a * b, 1);
    const data = c.data.subarray(from * width, to * width) as TypedArray;
    return [name, { data, dims: [to - from, ...c.dims.slice(1)], dtype: c.dtype }];
  }));
}

/** Returns the columns in another order of rows, the same for all; numbers from the same seed are the same. */
export function shuffled(columns: Columns, seed = 1): Columns {
  const n = Object.values(columns)[0]!.dims[0]!;
  const order = Array.from({ length: n }, (_, i) => i);
  let s = seed;
  for (let i = n - 1; i > 0; i--) {
    s = (s * 16807) % 2147483647;
    const j = s % (i + 1);
    [order[i], order[j]] = [order[j]!, order[i]!];
  }
  return Object.fromEntries(Object.entries(columns).map(([name, c]) => {
    const width = c.dims.slice(1).reduce((a, b) => a * b, 1);
    const data = c.data.slice() as Float64Array;
    order.forEach((r, i) => data.set((c.data as Float64Array).subarray(r * width, (r + 1) * width), i * width));
    return [name, { ...c, data }];
  }));
}
