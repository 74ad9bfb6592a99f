/** Batches of token ids, with all that a model takes besides them. */
import { OnnxTrainError, ShapeError } from "../errors.js";
import type { Batch } from "../feeds.js";

/** Token ids; or with labels, where -100 is not learned. */
export type TokenRow = ArrayLike<number | bigint> | { readonly ids: ArrayLike<number | bigint>; readonly labels?: ArrayLike<number | bigint> };

export interface TokenBatchOptions {
  /** The token that rows are filled up with; its label does not count. */
  readonly pad?: number;
  /** Lengths are rounded up to a multiple of this. */
  readonly multiple?: number;
}

const IGNORED = -100;

/**
 * Gives a batch by the names that a model has for its inputs (`trainer.inputs`). Rows are filled up
 * at the right; mask, positions and types are made where the model takes them.
 */
export function tokenBatch(rows: readonly TokenRow[], names: readonly string[], options: TokenBatchOptions = {}): Batch {
  const { pad = 0, multiple = 1 } = options;
  const given = rows.map((row) => ("ids" in row ? { ids: row.ids, labels: row.labels ?? row.ids } : { ids: row, labels: row }));
  const bad = given.findIndex(({ ids, labels }) => ids.length === 0 || ids.length !== labels.length);
  if (!given.length || bad >= 0) {
    throw new OnnxTrainError(given.length ? `row ${bad} is empty, or has not as many labels as tokens` : "a batch needs at least one row");
  }
  const length = Math.ceil(Math.max(...given.map((r) => r.ids.length)) / multiple) * multiple;
  const dims = [given.length, length];
  const filled = (of: (row: { ids: ArrayLike<number | bigint>; labels: ArrayLike<number | bigint> }, i: number) => number | bigint, rest: number) => ({
    dims,
    data: BigInt64Array.from(given.flatMap((row) => Array.from({ length }, (_, i) => BigInt(i < row.ids.length ? of(row, i) : rest)))),
  });
  const made: Record<string, () => Batch[string]> = {
    input_ids: () => filled((row, i) => row.ids[i]!, pad),
    labels: () => filled((row, i) => row.labels[i]!, IGNORED),
    attention_mask: () => filled(() => 1, 0),
    position_ids: () => filled((_, i) => i, 0),
    token_type_ids: () => filled(() => 0, 0),
    cache_position: () => ({ dims: [length], data: BigInt64Array.from({ length }, (_, i) => BigInt(i)) }),
  };
  const unknown = names.filter((n) => !Object.hasOwn(made, n));
  if (unknown.length) {
    throw new ShapeError(
      `the model takes ${unknown.join(", ")}, which does not follow from token ids\n` +
        "hint: build it from without_cache(model), or give such inputs yourself",
    );
  }
  return Object.fromEntries(names.map((n) => [n, made[n]!()]));
}
