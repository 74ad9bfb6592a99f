import type { Meta } from "./checkpoint.js";
import { count, type HostTensor, kindOf, type TypedArray } from "./dtypes.js";
import { CheckpointError, OnnxTrainError, ShapeError } from "./errors.js";
import { nameOf } from "./feeds.js";
import { uniform } from "./random.js";

/** Names of the rows in a checkpoint start with it. */
const PREFIX = "replay/";

/** Rows by input name: typed arrays of equal numbers of rows, or tensors whose first size is the number of rows. */
export type Columns = Readonly<Record<string, TypedArray | { readonly data: TypedArray; readonly dims: readonly number[] }>>;

export interface ReplayOptions {
  /** Limit for the bytes of all rows. */
  readonly maxBytes: number;
  /** Random seed of the choice. Default: 0. */
  readonly seed?: number;
}

/**
 * A uniform sample of all rows that were added, within a limit of memory: training on it beside new data keeps a model
 * from forgetting. Each row that was ever added is in it with the same probability (reservoir sampling).
 * `trainer.replay = buffer` stores it in every checkpoint of the trainer.
 */
export class ReplayBuffer {
  readonly maxBytes: number;
  readonly seed: number;
  #seen = 0;
  #columns = new Map<string, HostTensor>();

  constructor({ maxBytes, seed = 0 }: ReplayOptions) {
    [this.maxBytes, this.seed] = [maxBytes, seed];
  }

  /** Number of rows in the buffer. */
  get size(): number {
    return [...this.#columns.values()][0]?.dims[0] ?? 0;
  }

  /** Number of rows that were ever added. */
  get seen(): number {
    return this.#seen;
  }

  /** The chosen rows, by input name. */
  get rows(): Record<string, HostTensor> {
    return Object.fromEntries(this.#columns);
  }

  /** Offers rows to the buffer; `rows` is their number, which flat typed arrays do not tell. */
  add(columns: Columns, rows: number): void {
    if (rows === 0) return;
    const given = this.#read(columns, rows);
    const bytes = [...given.values()].reduce((sum, t) => sum + t.data.byteLength / rows, 0);
    const capacity = Math.floor(this.maxBytes / bytes);
    if (capacity === 0) throw new OnnxTrainError(`a row has more than maxBytes: ${this.maxBytes}`);
    // Row i of all takes a place at random among the first i + 1, if that is in the buffer.
    const random = uniform(this.seed + this.#seen);
    const source = new Map<number, number>();
    for (let i = 0; i < rows; i++) {
      const at = this.#seen + i;
      const place = at < capacity ? at : Math.floor(random() * (at + 1));
      if (place < capacity) source.set(place, i);
    }
    const size = Math.min(this.#seen + rows, capacity);
    for (const [name, t] of given) {
      const width = t.data.length / rows;
      const data = new (kindOf(t.dtype).array)(size * width);
      const old = this.#columns.get(name);
      if (old) data.set(old.data as never);
      for (const [place, i] of source) data.set(t.data.subarray(i * width, (i + 1) * width) as never, place * width);
      this.#columns.set(name, { dtype: t.dtype, dims: [size, ...t.dims.slice(1)], data });
    }
    this.#seen += rows;
  }

  /** Returns new rows followed by those of the buffer, to train on both. */
  mix(columns: Columns, rows: number): Record<string, HostTensor> {
    return Object.fromEntries([...this.#read(columns, rows)].map(([name, t]) => {
      const old = this.#columns.get(name);
      if (!old) return [name, t];
      const data = new (kindOf(t.dtype).array)(t.data.length + old.data.length);
      data.set(t.data as never);
      data.set(old.data as never, t.data.length);
      return [name, { dtype: t.dtype, dims: [rows + old.dims[0]!, ...t.dims.slice(1)], data }];
    }));
  }

  #read(columns: Columns, rows: number): Map<string, HostTensor> {
    const given = new Map(Object.entries(columns).map(([name, value]) => {
      const data = ArrayBuffer.isView(value) ? value : value.data;
      const width = data.length / Math.max(rows, 1);
      const dims = ArrayBuffer.isView(value) ? [rows, ...(width === 1 ? [] : [width])] : value.dims;
      if (dims[0] !== rows || count(dims) !== data.length) throw new ShapeError(`'${name}' has ${data.length} elements, which are not ${rows} rows`);
      return [name, { dtype: nameOf(data), dims, data }] as const;
    }));
    const kinds = (tensors: ReadonlyMap<string, HostTensor>) =>
      [...tensors].map(([name, t]) => `${name} ${t.dtype}[${t.dims.slice(1).join(", ")}]`).sort().join(", ");
    if (this.#columns.size && kinds(given) !== kinds(this.#columns)) {
      throw new ShapeError(`the rows differ from those of the buffer: ${kinds(given)}, expected ${kinds(this.#columns)}`);
    }
    return given;
  }

  /** Adds the buffer to the content of a checkpoint. */
  static store(buffer: ReplayBuffer | undefined, tensors: Map<string, HostTensor>, meta: Meta): Meta {
    const own = new Map([...meta].filter(([key]) => key !== "replay"));
    if (!buffer) return own;
    for (const [name, t] of buffer.#columns) tensors.set(PREFIX + name, t);
    return own.set("replay", `{"max_bytes":${buffer.maxBytes},"seed":${buffer.seed},"seen":${buffer.#seen}}`);
  }

  /** Returns the buffer of a checkpoint, if it has one. */
  static restore(tensors: ReadonlyMap<string, HostTensor>, meta: Meta, label: string): ReplayBuffer | undefined {
    const text = meta.get("replay");
    const columns = [...tensors].filter(([name]) => name.startsWith(PREFIX)).map(([name, t]) => [name.slice(PREFIX.length), t] as const);
    if (text === undefined || columns.length === 0) return undefined; // C++ keeps the metadata, but not the rows
    const { max_bytes: maxBytes, seed, seen } = JSON.parse(text) as Record<string, unknown>;
    const damaged = () => new CheckpointError(`${label}: the replay buffer is damaged`);
    if (![maxBytes, seed, seen].every(Number.isSafeInteger)) throw damaged();
    const bytes = columns.reduce((sum, [, t]) => sum + t.data.byteLength / Math.max(t.dims[0] ?? 0, 1), 0);
    const rows = Math.min(seen as number, Math.floor((maxBytes as number) / Math.max(bytes, 1)));
    if (columns.some(([, t]) => t.dims[0] !== rows)) throw damaged();
    const buffer = new ReplayBuffer({ maxBytes: maxBytes as number, seed: seed as number });
    buffer.#seen = seen as number;
    buffer.#columns = new Map(columns);
    return buffer;
  }
}
