import { grayPicture } from "./display.js";
import { $, make, siteFile } from "../shell/dom.js";

/** Images of numbers from 0 to 1, one after the other, and what they show. */
export interface Digits {
  readonly image: Float32Array;
  readonly labels: Uint8Array;
}

/** Digits to train on, digits that are never trained on, and how many pixels a side has. */
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

/** Returns the bytes of a file of digits, which is sent packed. */
export async function bytesOf(name: string): Promise<Uint8Array<ArrayBuffer>> {
  const { body } = await get(`${name}.packed`);
  return new Uint8Array(await new Response(body!.pipeThrough(new DecompressionStream("deflate-raw"))).arrayBuffer());
}

/** Loads digits by their name. */
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

/** Returns the first rows. */
export const first = (d: Digits, n: number): Digits => ({
  image: d.image.subarray(0, (n * d.image.length) / d.labels.length),
  labels: d.labels.subarray(0, n),
});

/** Returns both, one after the other. */
export function joined(a: Digits, b: Digits): Digits {
  const image = new Float32Array(a.image.length + b.image.length);
  image.set(a.image);
  image.set(b.image, a.image.length);
  return { image, labels: Uint8Array.of(...a.labels, ...b.labels) };
}

/** Returns some rows, drawn by chance. */
export function some(d: Digits, n: number): Digits {
  const width = d.image.length / d.labels.length;
  const rows = Array.from({ length: n }, () => Math.floor(Math.random() * d.labels.length));
  const image = new Float32Array(n * width);
  rows.forEach((r, i) => image.set(d.image.subarray(r * width, (r + 1) * width), i * width));
  return { image, labels: Uint8Array.from(rows, (r) => d.labels[r]!) };
}

/** Drawings of the person: what they show, and others like them to learn from. */

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

  /** Returns the number of a class by its name; one that was not there comes last. */
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

  /** Returns all drawings and those like them as rows. */
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

  /** Returns everything as text, to be kept. */
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
