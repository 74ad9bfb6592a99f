/** Inference with a plain ONNX model in a worker. */
export interface Floats {
  readonly data: Float32Array<ArrayBuffer>;
  readonly dims: readonly number[];
}

/** Message to the worker: a model to load, or inputs to run. */
export interface RunRequest {
  readonly model?: Uint8Array;
  readonly threads?: number;
  readonly feeds?: Readonly<Record<string, Floats>>;
}

/** Message from the worker. */
export interface RunResponse {
  readonly outputs: Readonly<Record<string, Floats>>;
  readonly error?: string;
}

/** Runs a model in a worker, one request after the other. */
export class Runner {
  readonly #worker: Worker;
  #queue: Promise<unknown> = Promise.resolve();

  private constructor(worker: Worker) {
    this.#worker = worker;
  }

  /** Downloads and loads a model. */
  static async open(address: URL): Promise<Runner> {
    const response = await fetch(address);
    if (!response.ok) throw new Error(`${address.pathname} cannot be loaded: ${response.status}`);
    return await Runner.of(new Uint8Array(await response.arrayBuffer()));
  }

  /** Loads a model. */
  static async of(model: Uint8Array): Promise<Runner> {
    const runner = new Runner(new Worker(new URL("./worker.ts", import.meta.url), { type: "module" }));
    await runner.#send({ model, threads: Math.min(4, navigator.hardwareConcurrency || 1) });
    return runner;
  }

  /** Returns the outputs by name. */
  async run(feeds: RunRequest["feeds"]): Promise<RunResponse["outputs"]> {
    return (await this.#send({ feeds: feeds! })).outputs;
  }

  close(): void {
    this.#worker.terminate();
  }

  #send(request: RunRequest): Promise<RunResponse> {
    const response = this.#queue.then(() => new Promise<RunResponse>((resolve, reject) => {
      this.#worker.onmessage = ({ data }: MessageEvent<RunResponse>) => (data.error ? reject(new Error(data.error)) : resolve(data));
      this.#worker.onerror = (event) => reject(new Error(event.message || "the worker cannot be started"));
      this.#worker.postMessage(request);
    }));
    this.#queue = response.catch(() => undefined);
    return response;
  }
}
