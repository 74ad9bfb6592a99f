import { count, type HostTensor, type TypedArray } from "./dtypes.js";
import type { Tensors } from "./engine.js";
import { ShapeError } from "./errors.js";
import type { Batch, TensorLike } from "./feeds.js";
import { findModel, type Manifest, type TensorSpec } from "./manifest.js";
import { uniform } from "./random.js";
import { type Device, TARGETS } from "./runtime.js";

/** Columns with one entry per row, an iterable of batches, or a function that returns the batches of an epoch. */
export type Dataset = Batch | Iterable<Batch> | AsyncIterable<Batch> | (() => Iterable<Batch> | AsyncIterable<Batch>);

export interface BatchOptions {
  readonly batchSize?: number | undefined;
  readonly shuffle?: boolean | undefined;
  readonly seed?: number | undefined;
  readonly dropLast?: boolean | undefined;
}

/** Returns the number of batches per epoch, or `undefined` if the dataset has no known length. */
export function batchCount(data: Dataset, specs: readonly TensorSpec[], options: BatchOptions): number | undefined {
  if (Array.isArray(data)) return data.length;
  if (!isColumns(data)) return undefined;
  const n = rowsOf(data, specs);
  const size = options.batchSize ?? 32;
  return options.dropLast ? Math.floor(n / size) : Math.ceil(n / size);
}

/** Yields the batches of one epoch. */
export async function* batches(
  data: Dataset, specs: readonly TensorSpec[], options: BatchOptions,
): AsyncGenerator<Batch> {
  if (!isColumns(data)) {
    yield* typeof data === "function" ? data() : data;
    return;
  }
  const n = rowsOf(data, specs);
  const size = options.batchSize ?? 32;
  if (!Number.isSafeInteger(size) || size < 1) throw new ShapeError(`batchSize must be at least 1, got ${size}`);
  const order = Uint32Array.from({ length: n }, (_, i) => i);
  if (options.shuffle) shuffle(order, options.seed ?? 0);
  const columns = specs.map((s) => [s.name, columnOf(s, data[s.name]!)] as const);
  for (let at = 0; at < n; at += size) {
    const rows = order.subarray(at, Math.min(at + size, n));
    if (options.dropLast && rows.length < size) return;
    yield Object.fromEntries(columns.map(([name, c]) => [name, gather(c, rows)]));
  }
}

/** Returns whether a dataset is given as columns. */
export const isColumns = (data: Dataset): data is Batch =>
  typeof data === "object" && !(Symbol.iterator in data) && !(Symbol.asyncIterator in data);

/** Returns the number of rows of a dataset. Iterates over all batches unless the dataset is given as columns. */
export async function countRows(data: Dataset, specs: readonly TensorSpec[]): Promise<number> {
  if (isColumns(data)) return rowsOf(data, specs);
  let n = 0;
  for await (const batch of batches(data, specs, {})) n += rowsOf(batch, specs);
  return n;
}

function rowsOf(data: Batch, specs: readonly TensorSpec[]): number {
  let first: { n: number; name: string } | undefined;
  for (const s of specs) {
    const value = data[s.name];
    if (value === undefined) throw new ShapeError(`missing from the data: ${s.name}`);
    const n = columnOf(s, value).n;
    if (first && first.n !== n) {
      throw new ShapeError(`'${s.name}' has ${n} rows, but '${first.name}' has ${first.n}`);
    }
    first ??= { n, name: s.name };
  }
  return first?.n ?? 0;
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
    if (!known) throw wrong("a flat array\nhint: pass { data, dims }");
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

/** Fisher-Yates shuffle with a generator that gives the same order on every platform. */
function shuffle(order: Uint32Array, seed: number): void {
  const next = uniform(seed);
  for (let i = order.length - 1; i > 0; i--) {
    const j = Math.floor(next() * (i + 1));
    [order[i], order[j]] = [order[j]!, order[i]!];
  }
}


/** Returns how many batches the artifacts train per session call on a device; 1 if they have no multi-step model for it. */
export function stepsPerCall(manifest: Manifest, device: Device): number {
  // On a GPU, parameters and state stay in device memory between calls: nothing is gained.
  if (device === "webgpu" || manifest.accumulate !== 1) return 1;
  const counts = manifest.models.filter((m) => m.role === "step").map((m) => m.steps_per_call);
  const most = Math.max(1, ...counts);
  const model = findModel(manifest, "step", TARGETS[device], most);
  return model && model.target === findModel(manifest, "step", TARGETS[device])?.target ? most : 1;
}

/** Yields groups of `count` consecutive batches of equal shape; the remaining batches come in groups of one. */
export async function* grouped(batches: AsyncIterable<Tensors>, count: number): AsyncGenerator<Tensors[]> {
  let waiting: Tensors[] = [];
  for await (const batch of batches) {
    if (waiting.length && sizes(batch) !== sizes(waiting[0]!)) {
      yield* waiting.map((b) => [b]);
      waiting = [];
    }
    waiting.push(batch);
    if (waiting.length === count) {
      yield waiting;
      waiting = [];
    }
  }
  yield* waiting.map((b) => [b]);
}

const sizes = (batch: Tensors): string => [...batch.values()].map((t) => t.dims.join()).join(";");

/** Stacks batches of equal shape along a new leading axis; reuses the buffers of `old` if they fit. */
export function stacked(batches: readonly Tensors[], old?: Tensors): Map<string, HostTensor> {
  const stack = new Map<string, HostTensor>();
  for (const [name, { dtype, dims, data }] of batches[0]!) {
    const size = data.length;
    const spare = old?.get(name)?.data;
    const fits = spare?.length === size * batches.length && spare.constructor === data.constructor;
    const all = fits ? spare : new (data.constructor as new (n: number) => Float32Array)(size * batches.length);
    batches.forEach((b, i) => (all as Float32Array).set(b.get(name)!.data as Float32Array, i * size));
    stack.set(name, { dtype, dims: [batches.length, ...dims], data: all as TypedArray });
  }
  return stack;
}

/** Returns the outputs of step `at` from the stacked outputs of a multi-step call. */
export function unstack(outputs: Tensors, at: number): Map<string, HostTensor> {
  return new Map(
    [...outputs].map(([name, { dtype, dims, data }]) => {
      const size = data.length / dims[0]!;
      return [name, { dtype, dims: dims.slice(1), data: data.slice(at * size, (at + 1) * size) as TypedArray }];
    }),
  );
}
