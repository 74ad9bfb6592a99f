import { Artifacts } from "./artifacts.js";
import type { HostTensor } from "./dtypes.js";
import { type Control, type Engine, LocalEngine, type Tensors } from "./engine.js";
import { revive, RuntimeError } from "./errors.js";
import { findModel, type Manifest, type ModelRole } from "./manifest.js";
import { checkMemory } from "./memory-plan.js";
import { type Device, inNode, type RuntimeOptions, TARGETS, webgpuProblem } from "./runtime.js";
import type { TrainerOptions } from "./trainer.js";
import type { FileData } from "./weights-file.js";
import { WORKER } from "./worker-text.js";

/** First request to the worker: open the models. */
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
  | { readonly requestFile: string };

/** Hint for workers that do not start. */
const WORKER_HINT = "hint: allow blob: in worker-src of the content security policy, or set worker: false";

interface Waiting {
  resolve(value: unknown): void;
  reject(error: Error): void;
}

/** Runs models in a worker, so that the page stays responsive. */
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
      if ("requestFile" in data) void this.#send(artifacts, data.requestFile);
      else this.#settle(data);
    };
    this.#worker.onerror = (event) => {
      this.#fail(new RuntimeError(`the worker failed: ${event.message || `it could not be started\n${WORKER_HINT}`}`));
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
        `the worker cannot be started: ${(error as Error).message}\n${WORKER_HINT}`,
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

  /** Sends a verified file to the worker. The page reads files, because `File`s and `Map`s of the caller live here. */
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

  predict(batch: Tensors, last?: boolean, releaseTraining?: boolean): Promise<Map<string, HostTensor>> {
    return this.#call("predict", batch, last, releaseTraining);
  }

  releasePredictor(): Promise<void> {
    return this.#call("releasePredictor");
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
      this.#fail(new RuntimeError("the worker was terminated"));
    }
  }
}

/** Where a worker loads ONNX Runtime from: workers have no import map, and bundlers do not see into them. */
type Address = Pick<RuntimeOptions, "runtimeUrl" | "wasmPaths">;

/** Returns the URLs of ONNX Runtime from the options, the import map or the bundler; `undefined` if there are none. */
export async function runtimeUrls(device: Device, { runtimeUrl, wasmPaths }: Address): Promise<Address | undefined> {
  // Relative URLs are resolved here: a worker created from a blob has no base URL.
  const absolute = (url: string) => new URL(url, globalThis.location?.href).href;
  const paths = typeof wasmPaths === "string" ? absolute(wasmPaths) : wasmPaths && { wasm: absolute(wasmPaths.wasm) };
  if (runtimeUrl !== undefined) return { runtimeUrl: absolute(runtimeUrl), wasmPaths: paths };
  const mapped = fromImportMap(device);
  if (mapped !== undefined) return { runtimeUrl: mapped, wasmPaths: paths };
  const { module, wasm } = device === "webgpu" ? bundledForGpu() : bundled();
  // Bundlers replace these specifiers by the URLs of their copies; otherwise they are unchanged.
  if (!UNBUNDLED.test(module.pathname) && !UNBUNDLED.test(wasm.pathname)) return { runtimeUrl: module.href, wasmPaths: paths ?? { wasm: wasm.href } };
  const beside = await siblingPackage(device, module);
  return beside === undefined ? undefined : { runtimeUrl: beside, wasmPaths: paths };
}

const UNBUNDLED = /\/onnxruntime-web\/(wasm|webgpu|ort-wasm[^/]*)$/;

/** Returns the URL of onnxruntime-web next to this package, for development servers that serve node_modules. */
async function siblingPackage(device: Device, named: URL): Promise<string | undefined> {
  if (!/\/onnxtrain\/dist\/(parts\/)?onnxruntime-web\//.test(named.pathname)) return undefined;
  const folder = named.pathname.replace(/\/onnxtrain\/dist\/.*/, "/onnxruntime-web/dist");
  const url = new URL(`${folder}/ort.${device === "webgpu" ? "webgpu" : "wasm"}.bundle.min.mjs`, named);
  try {
    const answer = await fetch(url, { method: "HEAD" });
    // Some servers respond to every path with an HTML page.
    return answer.ok && answer.headers.get("Content-Type")?.includes("javascript") ? url.href : undefined;
  } catch {
    return undefined;
  }
}

/** Resolves the runtime with the page's import map. */
function fromImportMap(device: Device): string | undefined {
  try {
    return import.meta.resolve(`onnxruntime-web/${device === "webgpu" ? "webgpu" : "wasm"}`);
  } catch {
    return undefined;
  }
}

const bundled = () => ({
  module: new URL("onnxruntime-web/wasm", import.meta.url),
  wasm: new URL("onnxruntime-web/ort-wasm-simd-threaded.wasm", import.meta.url),
});

const bundledForGpu = () => ({
  module: new URL("onnxruntime-web/webgpu", import.meta.url),
  wasm: new URL("onnxruntime-web/ort-wasm-simd-threaded.asyncify.wasm", import.meta.url),
});

/** Opens an engine on the requested device; falls back from WebGPU to wasm and reports why. */
export async function openEngine(
  artifacts: Artifacts, roles: readonly ModelRole[], values: Tensors, options: TrainerOptions,
): Promise<Engine> {
  const { device = "auto" } = options;
  const fallback: Device = inNode() ? "node" : "wasm";
  const has = (d: Device) => roles.every((r) => findModel(artifacts.manifest, r, TARGETS[d]));
  if (device !== "webgpu" && (device !== "auto" || fallback === "node" || !has("webgpu"))) {
    return await open(artifacts, device === "auto" ? fallback : device, roles, values, options);
  }
  let problem = has("webgpu") ? await webgpuProblem() : 'these artifacts were not built with target="webgpu"';
  if (problem === undefined) {
    try {
      return await open(artifacts, "webgpu", roles, values, options);
    } catch (error) {
      if (!(error instanceof RuntimeError)) throw error;
      problem = error.message;
    }
  }
  notify(options, `falling back from WebGPU to ${fallback}: ${problem}`);
  return await open(artifacts, fallback, roles, values, options);
}

const notify = ({ onMessage = (message: string) => console.warn(message) }: TrainerOptions, message: string): void =>
  onMessage(`onnxtrain: ${message}`);

async function open(
  artifacts: Artifacts, device: Device, roles: readonly ModelRole[], values: Tensors, options: TrainerOptions,
): Promise<Engine> {
  checkMemory(artifacts.manifest, device, options.sizes ?? {}, options.memoryLimit);
  const inWorker = (options.worker ?? true) && !inNode() && typeof Worker === "function";
  const address = inWorker && (await runtimeUrls(device, options));
  if (address) return await WorkerEngine.create(artifacts, device, roles, values, { ...options, ...address });
  if (inWorker) notify(options, "training runs in the main thread: the worker cannot resolve ONNX Runtime\nhint: set runtimeUrl to the URL of ONNX Runtime's module");
  return await LocalEngine.create(artifacts, device, roles, values, options);
}
