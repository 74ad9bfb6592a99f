/** Returns the sha256 of the concatenated parts as lower-case hex digits. */
export async function sha256(...parts: readonly Uint8Array[]): Promise<string> {
  const data = parts.length === 1 ? parts[0]! : concat(parts);
  // Insecure contexts (plain http) have no SubtleCrypto.
  const digest = globalThis.crypto?.subtle
    ? new Uint8Array(await crypto.subtle.digest("SHA-256", data as Uint8Array<ArrayBuffer>))
    : plainSha256(data);
  return hex(digest);
}

/** Concatenates byte arrays. */
export function concat(parts: readonly Uint8Array[]): Uint8Array {
  const all = new Uint8Array(parts.reduce((n, p) => n + p.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

/** Computes the digest without SubtleCrypto. */
export const plainSha256 = (data: Uint8Array): Uint8Array => new Sha256().add(data).bytes();

/** Incremental sha256: SubtleCrypto digests whole buffers only. */
export class Sha256 {
  readonly #round: Int32Array;
  readonly #state: Int32Array;
  readonly #schedule = new Int32Array(64);
  /** Bytes that do not fill a block yet. */
  readonly #rest = new Uint8Array(64);
  #size = 0;

  constructor() {
    const { round, start } = constants();
    this.#round = round;
    this.#state = start;
  }

  add(data: Uint8Array): this {
    let at = 0;
    const held = this.#size % 64;
    this.#size += data.length;
    if (held) {
      at = Math.min(64 - held, data.length);
      this.#rest.set(data.subarray(0, at), held);
      if (held + at < 64) return this;
      this.#block(new DataView(this.#rest.buffer), 0);
    }
    const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
    for (; at + 64 <= data.length; at += 64) this.#block(view, at);
    this.#rest.set(data.subarray(at));
    return this;
  }

  /** Finishes the digest; `add` must not be called afterwards. */
  bytes(): Uint8Array {
    const size = this.#size;
    const end = new Uint8Array((size % 64 < 56 ? 64 : 128) - (size % 64));
    end[0] = 0x80;
    const view = new DataView(end.buffer);
    view.setUint32(end.length - 8, Math.floor(size / 2 ** 29));
    view.setUint32(end.length - 4, (size << 3) >>> 0);
    this.add(end);
    const out = new DataView(new ArrayBuffer(32));
    this.#state.forEach((v, i) => out.setInt32(4 * i, v));
    return new Uint8Array(out.buffer);
  }

  digest(): string {
    return hex(this.bytes());
  }

  #block(view: DataView, block: number): void {
    const schedule = this.#schedule;
    const round = this.#round;
    for (let i = 0; i < 16; i++) schedule[i] = view.getInt32(block + 4 * i);
    for (let i = 16; i < 64; i++) {
      const x = schedule[i - 15]!;
      const y = schedule[i - 2]!;
      const s0 = rotateRight(x, 7) ^ rotateRight(x, 18) ^ (x >>> 3);
      const s1 = rotateRight(y, 17) ^ rotateRight(y, 19) ^ (y >>> 10);
      schedule[i] = (schedule[i - 16]! + s0 + schedule[i - 7]! + s1) | 0;
    }
    const state = this.#state;
    let [a, b, c, d, e, f, g, h] = [state[0]!, state[1]!, state[2]!, state[3]!, state[4]!, state[5]!, state[6]!, state[7]!];
    for (let i = 0; i < 64; i++) {
      const s1 = rotateRight(e, 6) ^ rotateRight(e, 11) ^ rotateRight(e, 25);
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + round[i]! + schedule[i]!) | 0;
      const s0 = rotateRight(a, 2) ^ rotateRight(a, 13) ^ rotateRight(a, 22);
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g; g = f; f = e; e = (d + t1) | 0; d = c; c = b; b = a; a = (t1 + t2) | 0;
    }
    state[0]! += a; state[1]! += b; state[2]! += c; state[3]! += d;
    state[4]! += e; state[5]! += f; state[6]! += g; state[7]! += h;
  }
}

const hex = (bytes: Uint8Array): string => Array.from(bytes, (b) => b.toString(16).padStart(2, "0")).join("");

const rotateRight = (x: number, n: number): number => (x >>> n) | (x << (32 - n));

/** SHA-256 constants: the first 32 bits of the fractional parts of roots of the first primes, in exact integer arithmetic. */
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
