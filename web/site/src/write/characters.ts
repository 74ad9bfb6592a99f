/** Characters and their numbers, pieces of a text, and the choice of the next character. */

/** What the model has room for; number 0 stands for every character that is too rare. */
export const LENGTH = 64;
export const CHARACTERS = 128;
const RARE = "\u25a1";

/** Returns how many characters a text has; signs of some scripts, and emoji, are two in a string's length. */
export const countOf = (text: string): number => {
  let count = 0;
  for (const _ of text) count++;
  return count;
};

/** The characters of a text, the commonest first, and their numbers. */
export class Alphabet {
  readonly characters: readonly string[];
  readonly #numbers: ReadonlyMap<string, number>;

  constructor(text: string) {
    const counts = new Map<string, number>();
    for (const c of text) counts.set(c, (counts.get(c) ?? 0) + 1);
    const common = [...counts].sort((a, b) => b[1] - a[1]).slice(0, CHARACTERS - 1);
    this.characters = [RARE, ...common.map(([c]) => c)];
    this.#numbers = new Map(this.characters.map((c, i) => [c, i]));
  }

  encode(text: string): number[] {
    return [...text].map((c) => this.#numbers.get(c) ?? 0);
  }

  decode(number: number): string {
    return this.characters[number] ?? RARE;
  }
}

/** Cuts pieces out of a text at random, [count, 64]. */
export function pieces(numbers: readonly number[], count: number): { ids: BigInt64Array; labels: BigInt64Array } {
  const ids = new BigInt64Array(count * LENGTH);
  for (let row = 0; row < count; row++) {
    const start = Math.floor(Math.random() * (numbers.length - LENGTH + 1));
    for (let i = 0; i < LENGTH; i++) ids[row * LENGTH + i] = BigInt(numbers[start + i]!);
  }
  return { ids, labels: ids.slice() };
}

/** Chooses one of the first `count` numbers by their logits; a low temperature takes the likeliest. */
export function choose(logits: ArrayLike<number>, count: number, temperature: number, random = Math.random()): number {
  let top = -Infinity;
  for (let i = 1; i < count; i++) top = Math.max(top, logits[i]!);
  const weights = Array.from({ length: count }, (_, i) => (i === 0 ? 0 : Math.exp((logits[i]! - top) / temperature)));
  let rest = random * weights.reduce((a, b) => a + b, 0);
  for (let i = 1; i < count; i++) if ((rest -= weights[i]!) <= 0) return i;
  return count - 1;
}
