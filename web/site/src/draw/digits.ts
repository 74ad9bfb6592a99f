import { siteFile } from "../shell/dom.js";

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

/** Gives the bytes of a file of digits, which is sent packed. */
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

/** Gives the first rows. */
export const first = (d: Digits, n: number): Digits => ({
  image: d.image.subarray(0, (n * d.image.length) / d.labels.length),
  labels: d.labels.subarray(0, n),
});

/** Gives both, one after the other. */
export function joined(a: Digits, b: Digits): Digits {
  const image = new Float32Array(a.image.length + b.image.length);
  image.set(a.image);
  image.set(b.image, a.image.length);
  return { image, labels: Uint8Array.of(...a.labels, ...b.labels) };
}

/** Gives some rows, drawn by chance. */
export function some(d: Digits, n: number): Digits {
  const width = d.image.length / d.labels.length;
  const rows = Array.from({ length: n }, () => Math.floor(Math.random() * d.labels.length));
  const image = new Float32Array(n * width);
  rows.forEach((r, i) => image.set(d.image.subarray(r * width, (r + 1) * width), i * width));
  return { image, labels: Uint8Array.from(rows, (r) => d.labels[r]!) };
}
