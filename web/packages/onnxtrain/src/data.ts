import { count, type HostTensor, type TypedArray } from "./dtypes.js";
import { ShapeError } from "./errors.js";
import type { Batch, TensorLike } from "./feeds.js";
import type { TensorSpec } from "./manifest.js";
import { uniform } from "./random.js";

/** Columns of rows, batches one by one, or a function that starts them anew for each epoch. */
export type Dataset = Batch | Iterable<Batch> | AsyncIterable<Batch> | (() => Iterable<Batch> | AsyncIterable<Batch>);

export interface BatchOptions {
  readonly batchSize?: number | undefined;
  readonly shuffle?: boolean | undefined;
  readonly seed?: number | undefined;
  readonly dropLast?: boolean | undefined;
}

/** Gives how many batches an epoch has, if that can be known. */
export function batchCount(data: Dataset, specs: readonly TensorSpec[], options: BatchOptions): number | undefined {
  if (Array.isArray(data)) return data.length;
  if (!isColumns(data)) return undefined;
  const n = rowsOf(data, specs);
  const size = options.batchSize ?? 32;
  return options.dropLast ? Math.floor(n / size) : Math.ceil(n / size);
}

/** Gives the batches of one epoch. */
export async function* batches(
  data: Dataset, specs: readonly TensorSpec[], options: BatchOptions,
): AsyncGenerator<Batch> {
  if (!isColumns(data)) {
    yield* typeof data === "function" ? data() : data;
    return;
  }
  const n = rowsOf(data, specs);
  const size = options.batchSize ?? 32;
  if (!Number.isSafeInteger(size) || size < 1) throw new ShapeError(`batchSize must be at least 1: ${size}`);
  const order = Uint32Array.from({ length: n }, (_, i) => i);
  if (options.shuffle) shuffle(order, options.seed ?? 0);
  const columns = specs.map((s) => [s.name, columnOf(s, data[s.name]!)] as const);
  for (let at = 0; at < n; at += size) {
    const rows = order.subarray(at, Math.min(at + size, n));
    if (options.dropLast && rows.length < size) return;
    yield Object.fromEntries(columns.map(([name, c]) => [name, gather(c, rows)]));
  }
}

/** Tells whether a dataset is columns of all rows. */
export const isColumns = (data: Dataset): data is Batch =>
  typeof data === "object" && !(Symbol.iterator in data) && !(Symbol.asyncIterator in data);

/** Gives how many rows a dataset has; batches that are made anew for each epoch are gone through. */
export async function countRows(data: Dataset, specs: readonly TensorSpec[]): Promise<number> {
  if (isColumns(data)) return rowsOf(data, specs);
  let n = 0;
  for await (const batch of batches(data, specs, {})) n += rowsOf(batch, specs);
  return n;
}

function rowsOf(data: Batch, specs: readonly TensorSpec[]): number {
  let found: { n: number; name: string } | undefined;
  for (const s of specs) {
    const value = data[s.name];
    if (value === undefined) throw new ShapeError(`missing from the data: ${s.name}`);
    const n = columnOf(s, value).n;
    if (found && found.n !== n) {
      throw new ShapeError(`'${s.name}' has ${n} rows, but '${found.name}' has ${found.n}`);
    }
    found ??= { n, name: s.name };
  }
  return found?.n ?? 0;
}

type Flat = TypedArray | readonly unknown[];

interface Column {
  readonly n: number;
  readonly row: number;
  readonly tail: readonly number[] | undefined;
  readonly data: Flat;
  readonly dtype: string | undefined;
}

function columnOf(spec: TensorSpec, value: TensorLike): Column {
  const wrong = (what: string) =>
    new ShapeError(`'${spec.name}' is ${spec.dtype}[${spec.shape.join(", ")}], got ${what}`);
  const inner = spec.shape.slice(1);
  const known = inner.every((d) => typeof d === "number") ? (inner as number[]) : undefined;
  if (Array.isArray(value) && Array.isArray(value[0])) {
    return { n: value.length, row: 1, tail: undefined, data: value, dtype: undefined };
  }
  if (Array.isArray(value) || ArrayBuffer.isView(value)) {
    const data = value as Flat;
    if (!known) throw wrong("a flat array\nhint: give { data, dims }");
    const row = count(known);
    if (row === 0 || data.length % row) throw wrong(`${data.length} elements, not a multiple of ${row}`);
    return { n: data.length / row, row, tail: known, data, dtype: undefined };
  }
  const t = value as { data?: Flat; dims?: readonly number[]; shape?: readonly number[]; type?: string; dtype?: string };
  const dims = t.dims ?? t.shape ?? (known && t.data ? [t.data.length / count(known), ...known] : undefined);
  if (!t.data || !dims || dims.length === 0) throw wrong("no rows");
  const tail = dims.slice(1);
  if (count(dims) !== t.data.length) throw wrong(`${t.data.length} elements for shape [${dims.join(", ")}]`);
  return { n: dims[0]!, row: count(tail), tail, data: t.data, dtype: t.type ?? t.dtype };
}

function gather(c: Column, rows: Uint32Array): TensorLike {
  if (!c.tail) return Array.from(rows, (r) => (c.data as readonly TensorLike[])[r]) as unknown as TensorLike;
  const dims = [rows.length, ...c.tail];
  const typed = ArrayBuffer.isView(c.data);
  const size = rows.length * c.row;
  const data = typed
    ? new (c.data.constructor as new (n: number) => Float32Array)(size)
    : new Array<unknown>(size);
  rows.forEach((r, i) => {
    const from = r * c.row;
    if (typed) (data as Float32Array).set((c.data as Float32Array).subarray(from, from + c.row), i * c.row);
    else for (let j = 0; j < c.row; j++) (data as unknown[])[i * c.row + j] = c.data[from + j];
  });
  return { data, dims, ...(c.dtype ? { dtype: c.dtype } : {}) } as unknown as HostTensor;
}

/** Fisher and Yates, with a generator that is the same everywhere. */
function shuffle(order: Uint32Array, seed: number): void {
  const next = uniform(seed);
  for (let i = order.length - 1; i > 0; i--) {
    const j = Math.floor(next() * (i + 1));
    [order[i], order[j]] = [order[j]!, order[i]!];
  }
}
