/** Images of 8x8 numbers from 0 to 1, and what they show. */
export type Digits = {
  readonly image: Float32Array;
  readonly labels: Uint8Array;
};

export const PIXELS = 64;

/** Loads the digits: those to train on, and those that are never trained on. */
export async function loadDigits(): Promise<{ train: Digits; test: Digits }> {
  const get = async (name: string) => {
    const response = await fetch(`./data/${name}`);
    if (!response.ok) throw new Error(`${name}: HTTP ${response.status}`);
    return response;
  };
  const about = (await (await get("digits.json")).json()) as { count: number; test: number; top: number };
  const pixels = new Uint8Array(await (await get("digits.bin")).arrayBuffer());
  const labels = new Uint8Array(await (await get("labels.bin")).arrayBuffer());
  const image = Float32Array.from(pixels, (v) => v / about.top);
  const split = about.count - about.test;
  return {
    train: { image: image.subarray(0, split * PIXELS), labels: labels.subarray(0, split) },
    test: { image: image.subarray(split * PIXELS), labels: labels.subarray(split) },
  };
}

/** Gives the first rows. */
export const first = (d: Digits, n: number): Digits => ({
  image: d.image.subarray(0, n * PIXELS),
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
