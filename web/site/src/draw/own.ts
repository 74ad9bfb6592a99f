/** Drawings of the person: what they show, and others like them to learn from. */
import { $, make } from "../shell/dom.js";
import type { Digits } from "./digits.js";
import { grayPicture } from "./pictures.js";

/** How many pictures are made from each drawing. */
export const VARIANTS = 48;
/** How many signs there may be besides the digits. */
const SIGNS = 8;
const DIGITS = Array.from({ length: 10 }, (_, i) => String(i));

interface Drawing {
  readonly label: number;
  readonly variants: readonly Float32Array[];
}

/** Names of classes, the digits first, and the drawings of each. */
export class Own {
  names: string[] = [...DIGITS];
  #drawings: Drawing[] = [];

  get count(): number {
    return this.#drawings.length;
  }

  /** Gives the number of a class by its name; one that was not there comes last. */
  label(name: string): number {
    const there = this.names.indexOf(name);
    if (there >= 0) return there;
    if (this.names.length >= DIGITS.length + SIGNS) throw new Error(`there are ${SIGNS} signs of yours already; "Forget my drawings" starts over`);
    this.names.push(name);
    return this.names.length - 1;
  }

  add(label: number, variants: readonly Float32Array[]): void {
    this.#drawings.push({ label, variants });
  }

  forget(): void {
    [this.names, this.#drawings] = [[...DIGITS], []];
  }

  /** Gives all drawings and those like them as rows. */
  rows(): Digits {
    const all = this.#drawings.flatMap((d) => d.variants.map((v) => [d.label, v] as const));
    const width = all[0]?.[1].length ?? 0;
    const image = new Float32Array(all.length * width);
    all.forEach(([, v], i) => image.set(v, i * width));
    return { image, labels: Uint8Array.from(all, ([label]) => label) };
  }

  /** Shows the drawings. */
  show(size: number): void {
    $("examples").replaceChildren(...this.#drawings.map((d) =>
      make("li", {}, grayPicture(d.variants[0]!, size), this.names[d.label]!)));
    $("signs").replaceChildren(...this.names.map((name) => make("option", { value: name })));
    $("forget").hidden = this.count === 0;
  }

  /** Gives everything as text, to be kept. */
  text(): string {
    return JSON.stringify({ names: this.names, drawings: this.#drawings.map((d) => ({ label: d.label, variants: d.variants.map((v) => Array.from(v, (p) => Math.round(100 * p))) })) });
  }

  /** Takes what `text` gave. */
  read(text: string): void {
    const kept = JSON.parse(text) as { names: string[]; drawings: { label: number; variants: number[][] }[] };
    this.names = kept.names;
    this.#drawings = kept.drawings.map((d) => ({ label: d.label, variants: d.variants.map((v) => Float32Array.from(v, (p) => p / 100)) }));
  }
}
