/** Calls of the SuperLink's fleet interface: signed, and repeated where the network fails. */
import { FlowerError } from "./errors.js";
import { base64, pem, sign } from "./keys.js";
import { Fields } from "./wire.js";

/** What went over the wire. */
export interface Traffic {
  sent: number;
  received: number;
  readonly calls: Record<string, number>;
}

export interface CallOptions {
  readonly timeout?: number;
  /** How often to try where the network fails; for ever unless this is given. */
  readonly tries?: number;
}

/** Answers of servers between us and the SuperLink: it is being started again. */
const PASSING = [502, 503, 504];
/** A signature holds for minutes; it need not be made anew for each call. */
const FRESH = 60_000;

/** Waits; an abort ends it early. */
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

export class Link {
  readonly traffic: Traffic = { sent: 0, received: 0, calls: {} };
  publicKey = new Uint8Array();
  readonly #url: string;
  readonly #key: CryptoKeyPair;
  readonly #signal: AbortSignal;
  readonly #tell: (message: string) => void;
  /** Milliseconds that the server's clock is ahead of ours. */
  #ahead = 0;
  #repaired = false;
  #headers: { made: number; values: Record<string, string> } | undefined;

  constructor(url: string, key: CryptoKeyPair, signal: AbortSignal, tell: (message: string) => void) {
    this.#url = url.replace(/\/+$/, "");
    this.#key = key;
    this.#signal = signal;
    this.#tell = tell;
  }

  /** Gives the server's time in seconds, as far as it is known. */
  now(): number {
    return (Date.now() + this.#ahead) / 1000;
  }

  /** Calls, and gives the answer. */
  async call(name: string, body: Uint8Array, options: CallOptions = {}): Promise<Fields> {
    for (let attempt = 1, wait = 1000; ; attempt++, wait = Math.min(wait * 2, 20_000)) {
      try {
        return await this.#once(name, body, options.timeout ?? 30_000);
      } catch (error) {
        const passing = !(error instanceof FlowerError) || PASSING.includes(error.status);
        if (!passing || this.#signal.aborted) throw error;
        if (attempt >= (options.tries ?? Infinity)) {
          throw error instanceof FlowerError ? error : new FlowerError(
            `${this.#url} does not answer: ${(error as Error).message}\n` +
              "hint: a page reaches a SuperLink only through a server that allows its origin: onnxtrain federate serve",
          );
        }
        this.#tell(`${name} is tried again: ${(error as Error).message}`);
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
    if (answer.status === 401 && !this.#repaired && date) {
      // Refused perhaps for a clock that is off: the server's own is in the answer.
      this.#repaired = true;
      this.#ahead = Date.parse(date) - Date.now();
      this.#headers = undefined;
      return await this.#once(name, body, timeout);
    }
    if (!answer.ok) throw await refused(name, answer);
    const data = new Uint8Array(await answer.arrayBuffer());
    this.traffic.received += data.length;
    return new Fields(data);
  }

  async #signed(): Promise<Record<string, string>> {
    if (this.#headers && Date.now() - this.#headers.made < FRESH) return this.#headers.values;
    if (!this.publicKey.length) this.publicKey = (await pem(this.#key.publicKey)) as Uint8Array<ArrayBuffer>;
    const time = new Date(Date.now() + this.#ahead).toISOString().replace("Z", "000+00:00");
    const values = {
      "content-type": "application/protobuf",
      "flwr-public-key": base64(this.publicKey),
      "flwr-timestamp": time,
      "flwr-signature": base64(await sign(this.#key.privateKey, time)),
    };
    this.#headers = { made: Date.now(), values };
    return values;
  }

  /** Gives the public key as a file, and with it everything that the first call needs. */
  async prepare(): Promise<Uint8Array> {
    await this.#signed();
    return this.publicKey;
  }
}

async function refused(name: string, answer: Response): Promise<FlowerError> {
  const text = await answer.text();
  let code = 0;
  try {
    code = Number((JSON.parse(text) as { code?: number }).code ?? 0);
  } catch {
    // Not from the SuperLink itself.
  }
  return new FlowerError(`${name}: HTTP ${answer.status} ${text.slice(0, 200)}`, answer.status, code);
}
