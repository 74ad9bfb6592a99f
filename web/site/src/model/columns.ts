import type { TensorSpec, TypedArray } from "onnxtrain";

/** An array whose first axis is the rows. */
export interface Column {
  readonly data: TypedArray;
  readonly dims: readonly number[];
  readonly dtype: string;
}

/** A column of a table: numbers, or strings if any cell is not a number. */
export type Cells = Float64Array | string[];

/** The contents of a file: columns of cells, or arrays. */
export type Table =
  | { readonly kind: "columns"; readonly name: string; readonly columns: ReadonlyMap<string, Cells> }
  | { readonly kind: "arrays"; readonly name: string; readonly arrays: ReadonlyMap<string, Column | string[]> };

export type Columns = Record<string, Column>;

/** Inputs for a model, and the label names of text targets. */
export interface Fitted {
  readonly columns: Columns;
  readonly labelNames: ReadonlyMap<string, readonly string[]>;
}

const describe = (t: TensorSpec): string => `'${t.name}' (${t.dtype}[${t.shape.join(", ")}])`;
const isIntegerInput = (t: TensorSpec): boolean => /int|bool/.test(t.dtype);

/** Encodes strings as indices in alphabetical order. */
export function encodeLabels(cells: readonly string[]): { data: Float64Array; names: string[] } {
  const names = [...new Set(cells)].sort();
  const indices = new Map(names.map((name, i) => [name, i]));
  return { data: Float64Array.from(cells, (c) => indices.get(c)!), names };
}

/** Selects the inputs of a model from a table; errors name the tensor and the column. */
export function columnsFor(specs: readonly TensorSpec[], table: Table): Fitted {
  const labelNames: LabelNames = new Map();
  const columns = table.kind === "arrays" ? fromArrays(specs, table, labelNames) : fromColumns(specs, table, labelNames);
  let rows: [number, string] | undefined;
  for (const [name, { dims }] of Object.entries(columns)) {
    rows ??= [dims[0]!, name];
    if (dims[0] !== rows[0]) throw new Error(`${table.name}: '${name}' has ${dims[0]} rows, '${rows[1]}' has ${rows[0]}`);
  }
  return { columns, labelNames };
}

type LabelNames = Map<string, readonly string[]>;

function fromArrays(specs: readonly TensorSpec[], table: Extract<Table, { kind: "arrays" }>, labelNames: LabelNames): Columns {
  const available = [...table.arrays.keys()].join(", ") || "no arrays";
  return Object.fromEntries(specs.map((t) => {
    const array = table.arrays.get(t.name);
    if (!array) throw new Error(`${table.name}: the model needs ${describe(t)}, the file has ${available}`);
    if (Array.isArray(array)) {
      if (!isIntegerInput(t) || t.role !== "target" || t.shape.length !== 1) throw new Error(`${table.name}: '${t.name}' contains text, the model needs ${describe(t)}`);
      const { data, names } = encodeLabels(array);
      labelNames.set(t.name, names);
      return [t.name, { data, dims: [data.length], dtype: "float64" }];
    }
    const fits = array.dims.length === t.shape.length && t.shape.every((d, i) => typeof d === "string" || d === array.dims[i]);
    if (!fits) throw new Error(`${table.name}: the model needs ${describe(t)}, the array has shape [${array.dims.join(", ")}]`);
    return [t.name, array];
  }));
}

/** Returns the column names for each tensor. */
function assignColumns(specs: readonly TensorSpec[], names: Iterable<string>): Map<string, string[]> {
  const left = new Set(names);
  const assigned = new Map<string, string[]>();
  for (const t of specs) {
    // A column with the tensor's name, or numbered columns: x.0, x.1, ...
    const own = [...left].filter((n) => n.startsWith(t.name) && /^[._[ ]?\d+\]?$/.test(n.slice(t.name.length)));
    const all = left.has(t.name) ? [t.name] : own;
    all.forEach((n) => left.delete(n));
    assigned.set(t.name, all);
  }
  // If one tensor has no columns, it gets the remaining ones, in order.
  const unassigned = specs.filter((t) => assigned.get(t.name)!.length === 0);
  if (unassigned.length === 1) assigned.set(unassigned[0]!.name, [...left]);
  return assigned;
}

function fromColumns(specs: readonly TensorSpec[], table: Extract<Table, { kind: "columns" }>, labelNames: LabelNames): Columns {
  const assigned = assignColumns(specs, table.columns.keys());
  return Object.fromEntries(specs.map((t) => {
    const names = assigned.get(t.name)!;
    if (!names.length) {
      throw new Error(`${table.name}: the model needs ${describe(t)}, but there is no column '${t.name}' or '${t.name}.0'; the columns are ${[...table.columns.keys()].slice(0, 12).join(", ")}`);
    }
    const tail = t.shape.slice(1).map((d) => (typeof d === "number" ? d : names.length));
    const width = tail.reduce((a, b) => a * b, 1);
    if (width !== names.length) {
      throw new Error(`${table.name}: the model needs ${describe(t)}, which is ${width} columns, got ${names.length}: ${names.slice(0, 8).join(", ")}${names.length > 8 ? ", ..." : ""}`);
    }
    return [t.name, stackColumns(t, names, table, width, tail, labelNames)];
  }));
}

function stackColumns(t: TensorSpec, names: string[], table: Extract<Table, { kind: "columns" }>, width: number, tail: number[], labelNames: LabelNames): Column {
  const parts = names.map((name) => {
    const cells = table.columns.get(name)!;
    if (!Array.isArray(cells)) return cells;
    if (t.role === "target" && isIntegerInput(t) && width === 1) {
      const encoded = encodeLabels(cells);
      labelNames.set(t.name, encoded.names);
      return encoded.data;
    }
    const line = cells.findIndex((c) => Number.isNaN(Number(c)));
    throw new Error(`${table.name}: column '${name}', line ${line + 2}: '${cells[line]}' is not a number`);
  });
  const rows = parts[0]!.length;
  const data = new Float64Array(rows * width);
  parts.forEach((part, c) => part.forEach((v, r) => (data[r * width + c] = v)));
  // Integer inputs must not have fractions: report the first one.
  if (isIntegerInput(t)) {
    const odd = data.findIndex((v) => !Number.isInteger(v));
    if (odd >= 0) throw new Error(`${table.name}: column '${names[odd % width]}', line ${Math.floor(odd / width) + 2}: ${data[odd]} is not an integer, as ${describe(t)} needs`);
  }
  return { data, dims: [rows, ...tail], dtype: "float64" };
}

/** Slices rows `from` to `to` of every column. */
export function rowsOf(columns: Columns, from: number, to: number): Columns {
  return Object.fromEntries(Object.entries(columns).map(([name, c]) => {
    const width = c.dims.slice(1).reduce((a, b) => a * b, 1);
    const data = c.data.subarray(from * width, to * width) as TypedArray;
    return [name, { data, dims: [to - from, ...c.dims.slice(1)], dtype: c.dtype }];
  }));
}

/** Shuffles the rows of all columns with a deterministic permutation. */
export function shuffleRows(columns: Columns, seed = 1): Columns {
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
