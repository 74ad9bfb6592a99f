/** A plain ONNX model that a page asks: no training, only answers. */
export interface Floats {
  readonly data: Float32Array<ArrayBuffer>;
  readonly dims: readonly number[];
}

/** To the worker: a model to open, or what to give it. */
export interface Question {
  readonly model?: Uint8Array;
  readonly threads?: number;
  readonly feeds?: Readonly<Record<string, Floats>>;
}

/** From the worker. */
export interface Answer {
  readonly outputs: Readonly<Record<string, Floats>>;
  readonly error?: string;
}

/** Asks a model in a worker, one question after the other. */
export class Runner {
  readonly #worker: Worker;
  #queue: Promise<unknown> = Promise.resolve();

  private constructor(worker: Worker) {
    this.#worker = worker;
  }

  /** Loads a model and makes it ready. */
  static async open(address: URL): Promise<Runner> {
    const response = await fetch(address);
    if (!response.ok) throw new Error(`${address.pathname} cannot be loaded: ${response.status}`);
    return await Runner.of(new Uint8Array(await response.arrayBuffer()));
  }

  /** Makes a model ready. */
  static async of(model: Uint8Array): Promise<Runner> {
    const runner = new Runner(new Worker(new URL("./worker.ts", import.meta.url), { type: "module" }));
    await runner.#ask({ model, threads: Math.min(4, navigator.hardwareConcurrency || 1) });
    return runner;
  }

  /** Returns the outputs by name. */
  async run(feeds: Question["feeds"]): Promise<Answer["outputs"]> {
    return (await this.#ask({ feeds: feeds! })).outputs;
  }

  close(): void {
    this.#worker.terminate();
  }

  #ask(question: Question): Promise<Answer> {
    const asked = this.#queue.then(() => new Promise<Answer>((resolve, reject) => {
      this.#worker.onmessage = ({ data }: MessageEvent<Answer>) => (data.error ? reject(new Error(data.error)) : resolve(data));
      this.#worker.onerror = (event) => reject(new Error(event.message || "the worker cannot be started"));
      this.#worker.postMessage(question);
    }));
    this.#queue = asked.catch(() => undefined);
    return asked;
  }
}
