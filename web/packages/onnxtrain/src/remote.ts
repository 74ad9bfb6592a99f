import type { Artifacts } from "./artifacts.js";
import type { HostTensor } from "./dtypes.js";
import type { Control, Engine, Tensors } from "./engine.js";
import { revive, RuntimeError } from "./errors.js";
import type { Manifest, ModelRole } from "./manifest.js";
import type { Device, RuntimeOptions } from "./runtime.js";
import type { FileData } from "./weights-file.js";
import { WORKER } from "./worker-text.js";

/** What a worker is asked first. */
export interface Opening {
  readonly manifest: Manifest;
  readonly device: Device;
  readonly roles: readonly ModelRole[];
  readonly values: Tensors;
  readonly options: RuntimeOptions;
}

export type Request =
  | { readonly id: number; readonly open: Opening }
  | { readonly id: number; readonly method: string; readonly args: readonly unknown[] }
  | { readonly file: string; readonly data?: FileData; readonly error?: { name: string; message: string } };

export type Reply =
  | { readonly id: number; readonly result?: unknown; readonly error?: { name: string; message: string } }
  | { readonly wanted: string };

/** What keeps a worker from starting. */
const ALLOWED = "hint: a content security policy must have blob: in worker-src; or give worker: false";

interface Waiting {
  resolve(value: unknown): void;
  reject(error: Error): void;
}

/** Runs models in a worker, so that the page stays live. */
export class WorkerEngine implements Engine {
  readonly #worker: Worker;
  readonly #waiting = new Map<number, Waiting>();
  #next = 0;

  private constructor(
    artifacts: Artifacts,
    readonly device: Device,
  ) {
    const text = URL.createObjectURL(new Blob([WORKER], { type: "text/javascript" }));
    this.#worker = new Worker(text, { type: "module" });
    const forget = () => URL.revokeObjectURL(text);
    this.#worker.addEventListener("message", forget, { once: true });
    this.#worker.addEventListener("error", forget, { once: true });
    this.#worker.onmessage = ({ data }: MessageEvent<Reply>) => {
      if ("wanted" in data) void this.#send(artifacts, data.wanted);
      else this.#settle(data);
    };
    this.#worker.onerror = (event) => {
      this.#fail(new RuntimeError(`the worker failed: ${event.message || `it could not be started\n${ALLOWED}`}`));
    };
  }

  /** Starts a worker and opens the models there. */
  static async create(
    artifacts: Artifacts, device: Device, roles: readonly ModelRole[], values: Tensors,
    options: RuntimeOptions & { readonly signal?: AbortSignal },
  ): Promise<WorkerEngine> {
    let engine: WorkerEngine;
    try {
      engine = new WorkerEngine(artifacts, device);
    } catch (error) {
      throw new RuntimeError(
        `the worker cannot be started: ${(error as Error).message}\n${ALLOWED}`,
      );
    }
    const { threads, runtimeUrl, wasmPaths, memoryLimit, signal } = options;
    const stop = () => engine.#fail(signal!.reason as Error);
    signal?.addEventListener("abort", stop, { once: true });
    const open: Opening = { manifest: artifacts.manifest, device, roles, values, options: { threads, runtimeUrl, wasmPaths, memoryLimit } };
    try {
      await engine.#ask((id) => ({ id, open }));
    } catch (error) {
      engine.#worker.terminate();
      throw error;
    } finally {
      signal?.removeEventListener("abort", stop);
    }
    return engine;
  }

  /** Files are read and checked on this side, where their source is known. */
  async #send(artifacts: Artifacts, file: string): Promise<void> {
    try {
      const data = await artifacts.data(file);
      artifacts.forget(file);
      this.#worker.postMessage({ file, data } satisfies Request);
    } catch (error) {
      const { name, message } = error as Error;
      this.#worker.postMessage({ file, error: { name, message } } satisfies Request);
    }
  }

  #ask<T>(make: (id: number) => Request): Promise<T> {
    const id = this.#next++;
    return new Promise<T>((resolve, reject) => {
      this.#waiting.set(id, { resolve: resolve as (value: unknown) => void, reject });
      this.#worker.postMessage(make(id));
    });
  }

  #settle(reply: { id: number; result?: unknown; error?: { name: string; message: string } }): void {
    const waiting = this.#waiting.get(reply.id);
    this.#waiting.delete(reply.id);
    if (reply.error) waiting?.reject(revive(reply.error.name, reply.error.message));
    else waiting?.resolve(reply.result);
  }

  #fail(error: Error): void {
    for (const { reject } of this.#waiting.values()) reject(error);
    this.#waiting.clear();
  }

  #call<T>(method: string, ...args: readonly unknown[]): Promise<T> {
    return this.#ask<T>((id) => ({ id, method, args }));
  }

  run(role: ModelRole, batch: Tensors, control: Control | readonly Control[]): Promise<Map<string, HostTensor>> {
    return this.#call("run", role, batch, control);
  }

  predict(batch: Tensors, last?: boolean, alone?: boolean): Promise<Map<string, HostTensor>> {
    return this.#call("predict", batch, last, alone);
  }

  rest(): Promise<void> {
    return this.#call("rest");
  }

  read(names: readonly string[]): Promise<Map<string, HostTensor>> {
    return this.#call("read", names);
  }

  write(tensors: Tensors): Promise<void> {
    return this.#call("write", tensors);
  }

  exportModel(): Promise<Uint8Array> {
    return this.#call("exportModel");
  }

  async release(): Promise<void> {
    try {
      await this.#call("release");
    } finally {
      this.#worker.terminate();
      this.#fail(new RuntimeError("the worker was stopped"));
    }
  }
}
