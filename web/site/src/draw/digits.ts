/** Images of numbers from 0 to 1, one after the other, and what they show. */
export type Digits = {
  readonly image: Float32Array;
  readonly labels: Uint8Array;
};

/** Digits to train on, digits that are never trained on, and how many pixels a side has. */
export interface Data {
  readonly train: Digits;
  readonly test: Digits;
  readonly size: number;
}

/** Loads digits by their name. */
export async function loadDigits(name: string): Promise<Data> {
  const get = async (file: string) => {
    const response = await fetch(`./data/${file}`);
    if (!response.ok) throw new Error(`${file}: HTTP ${response.status}`);
    return response;
  };
  const about = (await (await get(`${name}.json`)).json()) as { count: number; size: number; test: number; top: number };
  const pixels = new Uint8Array(await (await get(`${name}.bin`)).arrayBuffer());
  const labels = new Uint8Array(await (await get(`${name}-labels.bin`)).arrayBuffer());
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

/** Gives the probabilities of the classes of each row. */
export function softmax(logits: Float32Array, classes = 10): Float32Array {
  const out = new Float32Array(logits.length);
  for (let at = 0; at < logits.length; at += classes) {
    const row = logits.subarray(at, at + classes);
    const top = Math.max(...row);
    const powers = row.map((v) => Math.exp(v - top));
    const sum = powers.reduce((a, b) => a + b, 0);
    out.set(powers.map((v) => v / sum), at);
  }
  return out;
}
