import { Fields, FlowerError, textBytes } from "./wire.js";
import { concat } from "../sha256.js";

/** Calls to the Fleet API of a SuperLink, signed with the key of a node. */

const CURVE = { name: "ECDSA", namedCurve: "P-384" };

export function subtle(): SubtleCrypto {
  if (globalThis.crypto?.subtle) return crypto.subtle;
  throw new FlowerError("the Web Crypto API is not available: the page is not a secure context\nhint: use https, or localhost");
}

/** Generates a key pair; a pair that is not extractable cannot leave the browser. */
export const newKey = async (extractable = false): Promise<CryptoKeyPair> =>
  (await subtle().generateKey(CURVE, extractable, ["sign", "verify"])) as CryptoKeyPair;

/** Serializes a key pair as JSON, for stores that hold text only. */
export async function exportKey(key: CryptoKeyPair): Promise<string> {
  return JSON.stringify(await subtle().exportKey("jwk", key.privateKey));
}

/** Restores a key pair from the text of `exportKey`. */
export async function importKey(text: string): Promise<CryptoKeyPair> {
  const { d, key_ops, ...shared } = JSON.parse(text) as JsonWebKey;
  const privateKey = await subtle().importKey("jwk", { ...shared, d } as JsonWebKey, CURVE, true, ["sign"]);
  const publicKey = await subtle().importKey("jwk", shared, CURVE, true, ["verify"]);
  return { privateKey, publicKey };
}

/** Encodes a public key as PEM. */
export async function pem(key: CryptoKey): Promise<Uint8Array> {
  const lines = base64(new Uint8Array(await subtle().exportKey("spki", key))).match(/.{1,64}/g)!;
  return textBytes(`-----BEGIN PUBLIC KEY-----\n${lines.join("\n")}\n-----END PUBLIC KEY-----\n`);
}

/** Returns the public key in OpenSSH format, as a line of a file for `flwr supernode register`. */
export async function publicKeyLine({ publicKey }: CryptoKeyPair): Promise<string> {
  const curve = "nistp384";
  const kind = `ecdsa-sha2-${curve}`;
  const point = new Uint8Array(await subtle().exportKey("raw", publicKey));
  // Each part is prefixed with its length in four bytes; all are shorter than 256 bytes.
  const parts = [textBytes(kind), textBytes(curve), point].flatMap((part) => [Uint8Array.of(0, 0, 0, part.length), part]);
  return `${kind} ${base64(concat(parts))}\n`;
}

/** Signs a text; the signature is DER-encoded, as in Python's cryptography package. */
export async function sign(key: CryptoKey, text: string): Promise<Uint8Array> {
  const data = textBytes(text) as Uint8Array<ArrayBuffer>;
  return toDer(new Uint8Array(await subtle().sign({ name: "ECDSA", hash: "SHA-256" }, key, data)));
}

/** Converts a raw ECDSA signature (r and s) to DER: integers without leading zeros and with a positive sign. */
export function toDer(pair: Uint8Array): Uint8Array {
  const half = pair.length / 2;
  const numbers = [pair.subarray(0, half), pair.subarray(half)].map((number) => {
    let start = 0;
    while (start < half - 1 && number[start] === 0) start++;
    const digits = number.subarray(start);
    const sign = digits[0]! > 127 ? [0] : [];
    return concat([Uint8Array.of(2, digits.length + sign.length, ...sign), digits]);
  });
  const content = concat(numbers);
  return concat([Uint8Array.of(0x30, content.length), content]);
}

export function base64(data: Uint8Array): string {
  let text = "";
  for (const byte of data) text += String.fromCharCode(byte);
  return btoa(text);
}

// Requests: signed, and retried on network errors.

/** Bytes sent and received, and calls by name. */
export interface Traffic {
  sent: number;
  received: number;
  readonly calls: Record<string, number>;
}

export interface CallOptions {
  readonly timeout?: number;
  /** Maximum number of attempts on network errors. Default: no limit. */
  readonly tries?: number;
}

/** Statuses of a proxy whose SuperLink is restarting. */
const TRANSIENT = [502, 503, 504];
/** Signatures are valid for minutes: reuse one for this many milliseconds. */
const SIGNATURE_LIFETIME = 60_000;

/** Resolves after some time, or as soon as the signal is aborted. */
export const sleep = (ms: number, signal: AbortSignal): Promise<void> =>
  new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener("abort", end);
    if (signal.aborted) end();
  });

/** A connection to the Fleet API of a SuperLink. */
export class FleetConnection {
  readonly traffic: Traffic = { sent: 0, received: 0, calls: {} };
  publicKey = new Uint8Array();
  readonly #url: string;
  readonly #key: CryptoKeyPair;
  readonly #signal: AbortSignal;
  readonly #notify: (message: string) => void;
  /** Offset of the server's clock in milliseconds. */
  #clockOffset = 0;
  #clockAdjusted = false;
  #headers: { made: number; values: Record<string, string> } | undefined;

  constructor(url: string, key: CryptoKeyPair, signal: AbortSignal, notify: (message: string) => void) {
    this.#url = url.replace(/\/+$/, "");
    this.#key = key;
    this.#signal = signal;
    this.#notify = notify;
  }

  /** Returns the server's time in seconds, with the clock offset known so far. */
  now(): number {
    return (Date.now() + this.#clockOffset) / 1000;
  }

  /** Calls a method and returns its response. */
  async call(name: string, body: Uint8Array, options: CallOptions = {}): Promise<Fields> {
    for (let attempt = 1, wait = 1000; ; attempt++, wait = Math.min(wait * 2, 20_000)) {
      try {
        return await this.#once(name, body, options.timeout ?? 30_000);
      } catch (error) {
        const transient = !(error instanceof FlowerError) || TRANSIENT.includes(error.status);
        if (!transient || this.#signal.aborted) throw error;
        if (attempt >= (options.tries ?? Infinity)) {
          throw error instanceof FlowerError ? error : new FlowerError(
            `no response from ${this.#url}: ${(error as Error).message}\n` +
              "hint: pages reach a SuperLink only through a server that allows their origin; run `onnxtrain federate serve`",
          );
        }
        this.#notify(`retrying ${name}: ${(error as Error).message}`);
        await sleep(wait * (0.5 + Math.random() / 2), this.#signal);
        if (this.#signal.aborted) throw error;
      }
    }
  }

  async #once(name: string, body: Uint8Array, timeout: number): Promise<Fields> {
    this.traffic.calls[name] = (this.traffic.calls[name] ?? 0) + 1;
    this.traffic.sent += body.length;
    const answer = await fetch(`${this.#url}/v1/fleet/${name}`, {
      method: "POST", body: body as Uint8Array<ArrayBuffer>, headers: await this.#signed(), signal: AbortSignal.timeout(timeout),
    });
    const date = answer.headers.get("date");
    if (answer.status === 401 && !this.#clockAdjusted && date) {
      // The signature may be rejected because our clock is wrong: adjust it to the server's Date header.
      this.#clockAdjusted = true;
      this.#clockOffset = Date.parse(date) - Date.now();
      this.#headers = undefined;
      return await this.#once(name, body, timeout);
    }
    if (!answer.ok) throw await callError(name, answer);
    const data = new Uint8Array(await answer.arrayBuffer());
    this.traffic.received += data.length;
    return new Fields(data);
  }

  async #signed(): Promise<Record<string, string>> {
    if (this.#headers && Date.now() - this.#headers.made < SIGNATURE_LIFETIME) return this.#headers.values;
    if (!this.publicKey.length) this.publicKey = (await pem(this.#key.publicKey)) as Uint8Array<ArrayBuffer>;
    const time = new Date(Date.now() + this.#clockOffset).toISOString().replace("Z", "000+00:00");
    const values = {
      "content-type": "application/protobuf",
      "flwr-public-key": base64(this.publicKey),
      "flwr-timestamp": time,
      "flwr-signature": base64(await sign(this.#key.privateKey, time)),
    };
    this.#headers = { made: Date.now(), values };
    return values;
  }

  /** Signs in advance and returns the public key as PEM. */
  async prepare(): Promise<Uint8Array> {
    await this.#signed();
    return this.publicKey;
  }
}

async function callError(name: string, answer: Response): Promise<FlowerError> {
  const text = await answer.text();
  let code = 0;
  try {
    code = Number((JSON.parse(text) as { code?: number }).code ?? 0);
  } catch {
    // Not a response of the SuperLink itself.
  }
  return new FlowerError(`${name}: HTTP ${answer.status} ${text.slice(0, 200)}`, answer.status, code);
}
