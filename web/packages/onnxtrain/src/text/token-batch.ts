/** Builds batches from token ids. */
import { OnnxTrainError, ShapeError } from "../errors.js";
import type { Batch } from "../feeds.js";

/** Token ids, optionally with labels; label -100 is ignored by the loss. */
export type TokenRow = ArrayLike<number | bigint> | { readonly ids: ArrayLike<number | bigint>; readonly labels?: ArrayLike<number | bigint> };

export interface TokenBatchOptions {
  /** Padding token; its label is ignored by the loss. Default: 0. */
  readonly pad?: number;
  /** Pad the length to a multiple of this. Default: 1. */
  readonly multiple?: number;
}

const IGNORE_INDEX = -100;

/**
 * Returns a batch for the inputs of a model (`trainer.inputs`). Rows are padded on the right; attention mask,
 * position ids and token type ids are added if the model has such inputs.
 */
export function tokenBatch(rows: readonly TokenRow[], names: readonly string[], options: TokenBatchOptions = {}): Batch {
  const { pad = 0, multiple = 1 } = options;
  const given = rows.map((row) => ("ids" in row ? { ids: row.ids, labels: row.labels ?? row.ids } : { ids: row, labels: row }));
  const bad = given.findIndex(({ ids, labels }) => ids.length === 0 || ids.length !== labels.length);
  if (!given.length || bad >= 0) {
    throw new OnnxTrainError(given.length ? `row ${bad} is empty, or its numbers of labels and tokens differ` : "a batch needs at least one row");
  }
  const length = Math.ceil(Math.max(...given.map((r) => r.ids.length)) / multiple) * multiple;
  const dims = [given.length, length];
  const filled = (of: (row: { ids: ArrayLike<number | bigint>; labels: ArrayLike<number | bigint> }, i: number) => number | bigint, rest: number) => ({
    dims,
    data: BigInt64Array.from(given.flatMap((row) => Array.from({ length }, (_, i) => BigInt(i < row.ids.length ? of(row, i) : rest)))),
  });
  const builders: Record<string, () => Batch[string]> = {
    input_ids: () => filled((row, i) => row.ids[i]!, pad),
    labels: () => filled((row, i) => row.labels[i]!, IGNORE_INDEX),
    attention_mask: () => filled(() => 1, 0),
    position_ids: () => filled((_, i) => i, 0),
    token_type_ids: () => filled(() => 0, 0),
    cache_position: () => ({ dims: [length], data: BigInt64Array.from({ length }, (_, i) => BigInt(i)) }),
  };
  const unknown = names.filter((n) => !Object.hasOwn(builders, n));
  if (unknown.length) {
    throw new ShapeError(
      `cannot build the inputs ${unknown.join(", ")} from token ids\n` +
        "hint: build the model from without_cache(model) in Python, or add these inputs to the batch yourself",
    );
  }
  return Object.fromEntries(names.map((n) => [n, builders[n]!()]));
}
