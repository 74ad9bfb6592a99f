/** Choosing the next token by its scores. */
import { OnnxTrainError } from "../errors.js";
import { uniform } from "../random.js";

export interface Sampling {
  /** 0, as it is unless given, takes the likeliest token; above, tokens are drawn. */
  readonly temperature?: number;
  /** Tokens are drawn from the likeliest ones that together have this probability. */
  readonly topP?: number;
  /** Of the draws: a whole number. */
  readonly seed?: number;
}

/** Gives what chooses a token from scores, one after the other. */
export function chooser({ temperature = 0, topP = 1, seed = 0 }: Sampling): (scores: ArrayLike<number>) => number {
  if (!(temperature >= 0) || !(topP > 0 && topP <= 1)) {
    throw new OnnxTrainError(`temperature must not be negative, topP must lie in (0, 1]: ${temperature}, ${topP}`);
  }
  if (!Number.isSafeInteger(seed)) throw new OnnxTrainError(`seed must be a whole number: ${seed}`);
  const random = uniform(seed);
  return (scores) => (temperature === 0 ? largest(scores) : drawn(scores, temperature, topP, random()));
}

function largest(scores: ArrayLike<number>): number {
  let best = 0;
  for (let i = 1; i < scores.length; i++) if (scores[i]! > scores[best]!) best = i;
  return best;
}

function drawn(scores: ArrayLike<number>, temperature: number, topP: number, chance: number): number {
  const top = scores[largest(scores)]!;
  const weights = Float64Array.from(scores, (s) => Math.exp((s - top) / temperature));
  const all = weights.reduce((a, b) => a + b, 0);
  const order = topP < 1 ? Uint32Array.from(weights.keys()).sort((a, b) => weights[b]! - weights[a]! || a - b) : undefined;
  const token = (i: number) => order?.[i] ?? i;
  let kept = 0;
  let count = 0;
  while (count < weights.length && (count === 0 || kept < topP * all)) kept += weights[token(count++)]!;
  let left = chance * kept;
  for (let i = 0; i < count; i++) {
    left -= weights[token(i)]!;
    if (left < 0) return token(i);
  }
  return token(count - 1);
}
