/** Gives the sha256 of some bytes as lower-case hexadecimal digits. */
export async function sha256(...parts: readonly Uint8Array[]): Promise<string> {
  const data = parts.length === 1 ? parts[0]! : concat(parts);
  // Pages that are not served securely have no subtle crypto.
  const digest = globalThis.crypto?.subtle
    ? new Uint8Array(await crypto.subtle.digest("SHA-256", data as Uint8Array<ArrayBuffer>))
    : plainSha256(data);
  return Array.from(digest, (b) => b.toString(16).padStart(2, "0")).join("");
}

/** Gives all parts in one piece. */
export function concat(parts: readonly Uint8Array[]): Uint8Array {
  const all = new Uint8Array(parts.reduce((n, p) => n + p.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

/** Gives the digest without help from the platform. */
export function plainSha256(data: Uint8Array): Uint8Array {
  const { round, start } = constants();
  const state = Int32Array.from(start);
  const words = new Int32Array(64);
  const padded = new Uint8Array((((data.length + 8) >> 6) + 1) << 6);
  padded.set(data);
  padded[data.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setUint32(padded.length - 8, Math.floor(data.length / 2 ** 29));
  view.setUint32(padded.length - 4, (data.length << 3) >>> 0);
  for (let block = 0; block < padded.length; block += 64) {
    for (let i = 0; i < 16; i++) words[i] = view.getInt32(block + 4 * i);
    for (let i = 16; i < 64; i++) {
      const x = words[i - 15]!;
      const y = words[i - 2]!;
      const s0 = turn(x, 7) ^ turn(x, 18) ^ (x >>> 3);
      const s1 = turn(y, 17) ^ turn(y, 19) ^ (y >>> 10);
      words[i] = (words[i - 16]! + s0 + words[i - 7]! + s1) | 0;
    }
    let [a, b, c, d, e, f, g, h] = state as unknown as [
      number, number, number, number, number, number, number, number,
    ];
    for (let i = 0; i < 64; i++) {
      const s1 = turn(e, 6) ^ turn(e, 11) ^ turn(e, 25);
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + round[i]! + words[i]!) | 0;
      const s0 = turn(a, 2) ^ turn(a, 13) ^ turn(a, 22);
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + t1) | 0, c, b, a, (t1 + t2) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((v, i) => (state[i] = state[i]! + v));
  }
  const out = new DataView(new ArrayBuffer(32));
  state.forEach((v, i) => out.setInt32(4 * i, v));
  return new Uint8Array(out.buffer);
}

const turn = (x: number, n: number): number => (x >>> n) | (x << (32 - n));

/** The first 32 bits of the fractions of roots of the first primes, exactly by whole numbers. */
function constants(): { round: Int32Array; start: Int32Array } {
  const primes: number[] = [];
  for (let n = 2; primes.length < 64; n++) if (primes.every((p) => n % p)) primes.push(n);
  const bits = (value: bigint) => Number(BigInt.asIntN(32, value));
  return {
    round: Int32Array.from(primes, (p) => bits(root(BigInt(p) << 96n, 3n))),
    start: Int32Array.from(primes.slice(0, 8), (p) => bits(root(BigInt(p) << 64n, 2n))),
  };
}

function root(value: bigint, degree: bigint): bigint {
  let low = 0n;
  let high = 1n << 64n;
  while (high - low > 1n) {
    const middle = (low + high) >> 1n;
    if (middle ** degree <= value) low = middle;
    else high = middle;
  }
  return low;
}
