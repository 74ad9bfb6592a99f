import type { TensorSpec, TypedArray } from "onnxtrain";

/** Numbers with a shape; the first axis counts rows. */
export interface Column {
  readonly data: TypedArray;
  readonly dims: readonly number[];
  readonly dtype: string;
}

/** What a file holds: single columns, or arrays. */
export type Table =
  | { readonly kind: "columns"; readonly name: string; readonly columns: ReadonlyMap<string, Float64Array> }
  | { readonly kind: "arrays"; readonly name: string; readonly arrays: ReadonlyMap<string, Column> };

export type Columns = Record<string, Column>;

const describe = (t: TensorSpec): string => `'${t.name}' (${t.dtype}[${t.shape.join(", ")}])`;

/** Gives each tensor that a model takes its numbers from a table; the error names the tensor and the column. */
export function columnsFor(specs: readonly TensorSpec[], table: Table): Columns {
  const found = table.kind === "arrays" ? fromArrays(specs, table) : fromColumns(specs, table);
  let rows: [number, string] | undefined;
  for (const [name, { dims }] of Object.entries(found)) {
    rows ??= [dims[0]!, name];
    if (dims[0] !== rows[0]) throw new Error(`${table.name}: '${name}' has ${dims[0]} rows, '${rows[1]}' has ${rows[0]}`);
  }
  return found;
}

function fromArrays(specs: readonly TensorSpec[], table: Extract<Table, { kind: "arrays" }>): Columns {
  const there = [...table.arrays.keys()].join(", ") || "nothing";
  return Object.fromEntries(specs.map((t) => {
    const array = table.arrays.get(t.name);
    if (!array) throw new Error(`${table.name}: the model takes ${describe(t)}, the archive has ${there}`);
    const fits = array.dims.length === t.shape.length && t.shape.every((d, i) => typeof d === "string" || d === array.dims[i]);
    if (!fits) throw new Error(`${table.name}: the model takes ${describe(t)}, the array has shape [${array.dims.join(", ")}]`);
    return [t.name, array];
  }));
}

function fromColumns(specs: readonly TensorSpec[], table: Extract<Table, { kind: "columns" }>): Columns {
  const left = new Set(table.columns.keys());
  const taken = new Map<string, string[]>();
  for (const t of specs) {
    // A column of the tensor's name, or numbered ones: x.0, x.1, ...
    const numbered = [...left].filter((n) => n.startsWith(t.name) && /^[._[ ]?\d+\]?$/.test(n.slice(t.name.length)));
    const names = left.has(t.name) ? [t.name] : numbered;
    names.forEach((n) => left.delete(n));
    taken.set(t.name, names);
  }
  // What no name belongs to goes, in its order, to the only tensor without columns.
  const open = specs.filter((t) => taken.get(t.name)!.length === 0);
  if (open.length === 1) taken.set(open[0]!.name, [...left]);
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
    const rows = table.columns.get(names[0]!)!.length;
    const data = new Float64Array(rows * width);
    names.forEach((name, c) => table.columns.get(name)!.forEach((v, r) => (data[r * width + c] = v)));
    // Whole numbers stay whole: numbers with a fraction are refused for a label, and named.
    if (/int|bool/.test(t.dtype)) {
      const odd = data.findIndex((v) => !Number.isInteger(v));
      if (odd >= 0) throw new Error(`${table.name}: column '${names[odd % width]}', line ${Math.floor(odd / width) + 2}: ${data[odd]} is no whole number, ${describe(t)} takes those`);
    }
    return [t.name, { data, dims: [rows, ...tail], dtype: "float64" }];
  }));
}

/** Gives rows `from` to `to` of every column. */
export function rowsOf(columns: Columns, from: number, to: number): Columns {
  return Object.fromEntries(Object.entries(columns).map(([name, c]) => {
    const width = c.dims.slice(1).reduce((a, b) => a * b, 1);
    const data = c.data.subarray(from * width, to * width) as TypedArray;
    return [name, { data, dims: [to - from, ...c.dims.slice(1)], dtype: c.dtype }];
  }));
}

/** Gives the columns in another order of rows, the same for all; numbers from the same seed are the same. */
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
