/** Wraps ONNX Runtime; no other module imports it. */
import type { InferenceSession, Tensor } from "onnxruntime-common";
import { type HostTensor, kindOf, type TypedArray } from "./dtypes.js";
import { deviceLost, wrapRuntimeError, RuntimeError } from "./errors.js";
import { type FileData, externalBytes } from "./weights-file.js";

export type OrtModule = typeof import("onnxruntime-common");
export type OrtTensor = Tensor;
export type OrtSession = InferenceSession;
export type SessionOptions = InferenceSession.SessionOptions;

export type Device = "node" | "cuda" | "directml" | "coreml" | "wasm" | "webgpu";

export interface RuntimeOptions {
  /** `auto` selects onnxruntime-node in Node; in pages WebGPU if artifacts and browser support it, else wasm. */
  readonly device?: Device | "auto" | undefined;
  /** Size of the runtime's thread pool; pages need COOP and COEP headers for more than one. */
  readonly threads?: number | undefined;
  /** Memory limit on wasm in bytes; training that is estimated to need more is rejected. Default: 4 GB. `Infinity` disables the check. */
  readonly memoryLimit?: number | undefined;
  /** URL of ONNX Runtime's module, if neither a bundler nor an import map resolves it. */
  readonly runtimeUrl?: string | undefined;
  /** URL of the directory with ONNX Runtime's `.wasm` files, or of the file, if they are not next to its module. */
  readonly wasmPaths?: string | { readonly wasm: string } | undefined;
}

export const inNode = (): boolean => typeof process === "object" && !!process.versions?.node;

/** The build targets that a device can run, best first; CPUs run all of them. */
export const TARGETS: Record<Device, readonly string[]> = {
  node: ["cpu", "wasm", "portable", "openvino", "webgpu", "cuda"],
  wasm: ["wasm", "cpu", "portable", "openvino", "webgpu", "cuda"],
  webgpu: ["webgpu", "portable"],
  cuda: ["cuda", "cpu", "portable", "wasm", "webgpu"],
  directml: ["portable", "cpu", "wasm", "webgpu"],
  coreml: ["portable", "cpu", "wasm", "webgpu"],
};

/** Execution providers of onnxruntime-node by device. Parameters and state are in memory of the CPU on all of them. */
const PROVIDERS: Partial<Record<Device, string>> = { node: "cpu", cuda: "cuda", directml: "dml", coreml: "coreml" };

/** Whether onnxruntime-node runs a device. */
export const isNative = (device: Device): boolean => device in PROVIDERS;

/** A loaded ONNX Runtime module that creates and runs sessions on one device. */
export class Runtime {
  /** Rejects the pending runs when the GPU device is lost. */
  readonly #waiting = new Set<(error: Error) => void>();
  #watched = false;
  /** Why the GPU device was lost. */
  #lost: string | undefined;

  private constructor(
    readonly ort: OrtModule,
    readonly device: Device,
    readonly threads: number | undefined,
  ) {}

  /** Loads ONNX Runtime for a device. */
  static async open(device: Device, options: RuntimeOptions = {}): Promise<Runtime> {
    const ort = await load(device, options.runtimeUrl);
    if (!isNative(device)) {
      const wasm = ort.env.wasm;
      // Without COOP and COEP headers, memory cannot be shared between threads.
      const shared = inNode() || globalThis.crossOriginIsolated === true;
      wasm.numThreads = shared ? (options.threads ?? (wasm.numThreads || 1)) : 1;
      if (options.wasmPaths !== undefined) wasm.wasmPaths = options.wasmPaths as string;
    }
    return new Runtime(ort, device, options.threads);
  }

  /** Creates a session; on WebGPU, the outputs in `onGpu` stay in GPU memory. */
  async session(
    model: Uint8Array,
    external: readonly { path: string; data: FileData }[],
    options: { onGpu?: readonly string[]; extra?: SessionOptions } = {},
  ): Promise<OrtSession> {
    const externalData = await Promise.all(external.map(async ({ path, data }) => ({ path, data: await externalBytes(data) })));
    const settings: SessionOptions = {
      executionProviders: [PROVIDERS[this.device] ?? this.device],
      enableMemPattern: false,
      ...(externalData.length ? { externalData } : {}),
      ...(isNative(this.device) && this.threads ? { intraOpNumThreads: this.threads } : {}),
      ...options.extra,
    };
    if (this.device === "webgpu" && options.onGpu?.length) {
      settings.preferredOutputLocation = Object.fromEntries(
        options.onGpu.map((name) => [name, "gpu-buffer" as const]),
      );
    }
    const session = await this.ort.InferenceSession.create(model, settings);
    if (this.device === "webgpu") await this.#watch();
    return session;
  }

  async #watch(): Promise<void> {
    if (this.#watched) return;
    this.#watched = true;
    const gpu = (await this.ort.env.webgpu.device) as unknown as { lost?: Promise<{ message: string }> } | undefined;
    void gpu?.lost?.then(({ message }) => {
      this.#lost = message;
      for (const fail of this.#waiting) fail(deviceLost("webgpu", message));
    });
  }

  /** Runs a session; rejects if the GPU device is lost meanwhile, because `session.run` would never return. */
  async run(session: OrtSession, feeds: Record<string, OrtTensor>): Promise<InferenceSession.OnnxValueMapType> {
    if (this.device !== "webgpu") return await session.run(feeds);
    if (this.#lost !== undefined) throw deviceLost("webgpu", this.#lost);
    return await new Promise((resolve, reject) => {
      this.#waiting.add(reject);
      session.run(feeds).then(resolve, reject).finally(() => this.#waiting.delete(reject));
    });
  }

  /** Returns an ONNX Runtime tensor that shares the memory of `t`. */
  tensor(t: HostTensor, name = "tensor"): OrtTensor {
    if (t.dtype === "bfloat16") {
      throw new RuntimeError(`'${name}' is bfloat16, which ONNX Runtime for JavaScript does not support`);
    }
    return new this.ort.Tensor(t.dtype as "float32", t.data as Float32Array, t.dims);
  }

  /** Copies an ONNX Runtime tensor to host memory. */
  async host(t: OrtTensor): Promise<HostTensor> {
    let data: TypedArray;
    try {
      data = (await t.getData()) as TypedArray;
    } catch (error) {
      throw this.#lost === undefined ? wrapRuntimeError(error, `reading from ${this.device}`) : deviceLost("webgpu", this.#lost);
    }
    const { array } = kindOf(t.type);
    // Some browsers return float16 as Float16Array; this package works on the raw bits.
    const own = data instanceof (array as unknown as new () => object)
      ? data
      : new array(data.buffer as ArrayBuffer, data.byteOffset, data.length);
    return { dtype: t.type, dims: t.dims, data: own };
  }
}

/** The oldest ONNX Runtime that runs our artifacts: major and minor version. */
const OLDEST_RUNTIME = [1, 20] as const;

/** Throws if ONNX Runtime is too old. npm cannot check this: no version range but `*` accepts prereleases. */
export function requireSupported(ort: OrtModule, name: string): void {
  const version = ort.env.versions?.common;
  if (version === undefined) return;
  const [major = 0, minor = 0] = version.split(".").map(Number);
  if (major < OLDEST_RUNTIME[0] || (major === OLDEST_RUNTIME[0] && minor < OLDEST_RUNTIME[1])) {
    throw new RuntimeError(`onnxtrain needs ONNX Runtime ${OLDEST_RUNTIME.join(".")} or newer, found ${version}\nhint: npm install ${name}@latest`);
  }
}

async function load(device: Device, url: string | undefined): Promise<OrtModule> {
  if (isNative(device) && !inNode()) throw new RuntimeError(`device ${device} needs Node\nhint: pages have wasm and webgpu`);
  const name = isNative(device) ? "onnxruntime-node" : "onnxruntime-web";
  const ort = await importRuntime(device, name, url);
  requireSupported(ort, name);
  return ort;
}

async function importRuntime(device: Device, name: string, url: string | undefined): Promise<OrtModule> {
  if (url !== undefined) return module(await import(/* @vite-ignore */ url));
  try {
    // The specifier is a variable, so that bundlers do not include Node's runtime in pages.
    if (inNode()) return module(await import(/* @vite-ignore */ name));
    if (device === "webgpu") return module(await import("onnxruntime-web/webgpu"));
    return module(await import("onnxruntime-web/wasm"));
  } catch (error) {
    throw new RuntimeError(
      `${name} cannot be loaded: ${(error as Error).message}\nhint: npm install ${name}` +
        (isNative(device) ? "" : ", or set runtimeUrl"),
    );
  }
}

/** CommonJS modules have their exports under `default`. */
const module = (imported: unknown): OrtModule => {
  const it = imported as OrtModule & { default?: OrtModule };
  return it.InferenceSession ? it : it.default!;
};

/** Returns why WebGPU is not available, or `undefined` if it is. */
export async function webgpuProblem(): Promise<string | undefined> {
  const gpu = (globalThis.navigator as { gpu?: { requestAdapter(): Promise<unknown> } } | undefined)?.gpu;
  if (!gpu) return "this browser has no WebGPU";
  try {
    return (await gpu.requestAdapter()) ? undefined : "no GPU adapter found";
  } catch (error) {
    return (error as Error).message;
  }
}
