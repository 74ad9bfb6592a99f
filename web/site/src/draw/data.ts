import { grayImage } from "./display.js";
import { $, make, siteFile } from "../shell/dom.js";

/** Concatenated images with pixel values from 0 to 1, and their labels. */
export interface Digits {
  readonly image: Float32Array;
  readonly labels: Uint8Array;
}

/** Training digits, test digits, and the side length of the images. */
export interface Data {
  readonly train: Digits;
  readonly test: Digits;
  readonly size: number;
}

async function get(file: string): Promise<Response> {
  const response = await fetch(siteFile(`data/${file}`));
  if (!response.ok) throw new Error(`${file}: HTTP ${response.status}`);
  return response;
}

/** Downloads and decompresses a file of digits. */
export async function bytesOf(name: string): Promise<Uint8Array<ArrayBuffer>> {
  const { body } = await get(`${name}.packed`);
  return new Uint8Array(await new Response(body!.pipeThrough(new DecompressionStream("deflate-raw"))).arrayBuffer());
}

/** Loads a dataset by name. */
export async function loadDigits(name: string): Promise<Data> {
  const about = (await (await get(`${name}.json`)).json()) as { count: number; size: number; test: number; top: number };
  const [pixels, labels] = [await bytesOf(name), await bytesOf(`${name}-labels`)];
  const image = Float32Array.from(pixels, (v) => v / about.top);
  const split = about.count - about.test;
  const at = split * about.size ** 2;
  return {
    train: { image: image.subarray(0, at), labels: labels.subarray(0, split) },
    test: { image: image.subarray(at), labels: labels.subarray(split) },
    size: about.size,
  };
}

/** Returns the first `n` rows. */
export const first = (d: Digits, n: number): Digits => ({
  image: d.image.subarray(0, (n * d.image.length) / d.labels.length),
  labels: d.labels.subarray(0, n),
});

/** Concatenates two datasets. */
export function concatenated(a: Digits, b: Digits): Digits {
  const image = new Float32Array(a.image.length + b.image.length);
  image.set(a.image);
  image.set(b.image, a.image.length);
  return { image, labels: Uint8Array.of(...a.labels, ...b.labels) };
}

/** Number of augmented images per drawing. */
export const VARIANTS = 48;
/** Maximum number of user-defined symbols. */
const MAX_SYMBOLS = 8;
const DIGITS = Array.from({ length: 10 }, (_, i) => String(i));

interface Drawing {
  readonly label: number;
  readonly variants: readonly Float32Array[];
}

/** The user's drawings and the class names: the digits, then user-defined symbols. */
export class UserDrawings {
  names: string[] = [...DIGITS];
  #drawings: Drawing[] = [];

  get count(): number {
    return this.#drawings.length;
  }

  /** Returns the index of a class by name; adds a new class at the end. */
  label(name: string): number {
    const index = this.names.indexOf(name);
    if (index >= 0) return index;
    if (this.names.length >= DIGITS.length + MAX_SYMBOLS) throw new Error(`at most ${MAX_SYMBOLS} symbols are supported; "Delete my drawings" removes them`);
    this.names.push(name);
    return this.names.length - 1;
  }

  add(label: number, variants: readonly Float32Array[]): void {
    this.#drawings.push({ label, variants });
  }

  clear(): void {
    [this.names, this.#drawings] = [[...DIGITS], []];
  }

  /** Returns all drawings with their augmented variants. */
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
      make("li", {}, grayImage(d.variants[0]!, size), this.names[d.label]!)));
    $("signs").replaceChildren(...this.names.map((name) => make("option", { value: name })));
    $("forget").hidden = this.count === 0;
  }

  /** Serializes the drawings. */
  text(): string {
    return JSON.stringify({ names: this.names, drawings: this.#drawings.map((d) => ({ label: d.label, variants: d.variants.map((v) => Array.from(v, (p) => Math.round(100 * p))) })) });
  }

  /** Restores the drawings from the result of `text`. */
  read(text: string): void {
    const saved = JSON.parse(text) as { names: string[]; drawings: { label: number; variants: number[][] }[] };
    this.names = saved.names;
    this.#drawings = saved.drawings.map((d) => ({ label: d.label, variants: d.variants.map((v) => Float32Array.from(v, (p) => p / 100)) }));
  }
}
