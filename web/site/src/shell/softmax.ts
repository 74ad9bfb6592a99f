/** Returns the softmax of each row. */
export function softmax(logits: Float32Array, classes: number): Float32Array {
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
