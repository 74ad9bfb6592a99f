/** Character-level tokenizer, random training sequences, and sampling. */

/** Sequence length and vocabulary size of the model; id 0 is the unknown character. */
export const LENGTH = 64;
export const CHARACTERS = 128;
const UNKNOWN = "\u25a1";

/** Returns the number of code points of a text: `length` counts characters of some scripts and emoji twice. */
export const countOf = (text: string): number => {
  let count = 0;
  for (const _ of text) count++;
  return count;
};

/** The vocabulary of a text: its characters by frequency. */
export class Vocabulary {
  readonly characters: readonly string[];
  readonly #ids: ReadonlyMap<string, number>;

  constructor(text: string) {
    const counts = new Map<string, number>();
    for (const c of text) counts.set(c, (counts.get(c) ?? 0) + 1);
    const common = [...counts].sort((a, b) => b[1] - a[1]).slice(0, CHARACTERS - 1);
    this.characters = [UNKNOWN, ...common.map(([c]) => c)];
    this.#ids = new Map(this.characters.map((c, i) => [c, i]));
  }

  encode(text: string): number[] {
    return [...text].map((c) => this.#ids.get(c) ?? 0);
  }

  decode(id: number): string {
    return this.characters[id] ?? UNKNOWN;
  }
}

/** Samples random training sequences [count, 64]. */
export function randomSequences(tokens: readonly number[], count: number): { ids: BigInt64Array; labels: BigInt64Array } {
  const ids = new BigInt64Array(count * LENGTH);
  for (let row = 0; row < count; row++) {
    const start = Math.floor(Math.random() * (tokens.length - LENGTH + 1));
    for (let i = 0; i < LENGTH; i++) ids[row * LENGTH + i] = BigInt(tokens[start + i]!);
  }
  return { ids, labels: ids.slice() };
}

/** Samples one of the first `count` ids from logits, except 0. */
export function sampleId(logits: ArrayLike<number>, count: number, temperature: number, random = Math.random()): number {
  let top = -Infinity;
  for (let i = 1; i < count; i++) top = Math.max(top, logits[i]!);
  const weights = Array.from({ length: count }, (_, i) => (i === 0 ? 0 : Math.exp((logits[i]! - top) / temperature)));
  let rest = random * weights.reduce((a, b) => a + b, 0);
  for (let i = 1; i < count; i++) if ((rest -= weights[i]!) <= 0) return i;
  return count - 1;
}
