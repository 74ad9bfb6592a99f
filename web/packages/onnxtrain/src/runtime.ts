/** The only file that knows ONNX Runtime. */
import type { InferenceSession, Tensor } from "onnxruntime-common";
import { kindOf, type HostTensor, type TypedArray } from "./dtypes.js";
import { RuntimeError } from "./errors.js";
import { deviceLost, failed } from "./failures.js";

export type OrtModule = typeof import("onnxruntime-common");
export type OrtTensor = Tensor;
export type OrtSession = InferenceSession;
export type SessionOptions = InferenceSession.SessionOptions;

export type Device = "node" | "wasm" | "webgpu";

export interface RuntimeOptions {
  /** `auto` takes Node's runtime in Node; in pages WebGPU where artifacts and browser allow it. */
  readonly device?: Device | "auto" | undefined;
  /** Of the runtime's pool; pages need COOP and COEP headers for more than one. */
  readonly threads?: number | undefined;
  /** Address of ONNX Runtime's module, where no bundler and no import map finds it. */
  readonly runtimeUrl?: string | undefined;
  /** Address of the folder with ONNX Runtime's `.wasm` files, or of the file, if not beside its module. */
  readonly wasmPaths?: string | { readonly wasm: string } | undefined;
}

export const inNode = (): boolean => typeof process === "object" && !!process.versions?.node;

/** The targets whose models a device runs, best first; a CPU runs them all. */
export const TARGETS: Record<Device, readonly string[]> = {
  node: ["cpu", "wasm", "portable", "webgpu", "cuda"],
  wasm: ["wasm", "cpu", "portable", "webgpu", "cuda"],
  webgpu: ["webgpu", "portable"],
};

/** One loaded ONNX Runtime and how to make sessions with it. */
export class Runtime {
  /** What waits for a GPU and is told when that is lost. */
  readonly #waiting = new Set<(error: Error) => void>();
  #watched = false;
  /** Why there is no GPU any more. */
  #gone: string | undefined;

  private constructor(
    readonly ort: OrtModule,
    readonly device: Device,
    readonly threads: number | undefined,
  ) {}

  /** Loads the runtime for a device. */
  static async open(device: Device, options: RuntimeOptions = {}): Promise<Runtime> {
    const ort = await load(device, options.runtimeUrl);
    if (device !== "node") {
      const wasm = ort.env.wasm;
      // Without these headers memory cannot be shared between threads.
      const shared = inNode() || globalThis.crossOriginIsolated === true;
      wasm.numThreads = shared ? (options.threads ?? 1) : 1;
      if (options.wasmPaths !== undefined) wasm.wasmPaths = options.wasmPaths as string;
    }
    return new Runtime(ort, device, options.threads);
  }

  /** Makes a session; outputs in `onGpu` stay there on WebGPU. */
  async session(
    model: Uint8Array,
    externalData: { path: string; data: Uint8Array }[],
    options: { onGpu?: readonly string[]; extra?: SessionOptions } = {},
  ): Promise<OrtSession> {
    const settings: SessionOptions = {
      executionProviders: [this.device === "node" ? "cpu" : this.device],
      enableMemPattern: false,
      ...(externalData.length ? { externalData } : {}),
      ...(this.device === "node" && this.threads ? { intraOpNumThreads: this.threads } : {}),
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
      this.#gone = message;
      for (const fail of this.#waiting) fail(deviceLost("webgpu", message));
    });
  }

  /** Runs a session; a GPU that is lost meanwhile ends the wait. */
  async run(session: OrtSession, feeds: Record<string, OrtTensor>): Promise<InferenceSession.OnnxValueMapType> {
    if (this.device !== "webgpu") return await session.run(feeds);
    if (this.#gone !== undefined) throw deviceLost("webgpu", this.#gone);
    return await new Promise((resolve, reject) => {
      this.#waiting.add(reject);
      session.run(feeds).then(resolve, reject).finally(() => this.#waiting.delete(reject));
    });
  }

  /** Gives ONNX Runtime's tensor over the same memory. */
  tensor(t: HostTensor, name = "tensor"): OrtTensor {
    if (t.dtype === "bfloat16") {
      throw new RuntimeError(`'${name}' is bfloat16, which ONNX Runtime for JavaScript has not`);
    }
    return new this.ort.Tensor(t.dtype as "float32", t.data as Float32Array, t.dims);
  }

  /** Gives the content of ONNX Runtime's tensor in plain memory. */
  async host(t: OrtTensor): Promise<HostTensor> {
    let data: TypedArray;
    try {
      data = (await t.getData()) as TypedArray;
    } catch (error) {
      throw this.#gone === undefined ? failed(error, `reading from ${this.device}`) : deviceLost("webgpu", this.#gone);
    }
    const { array } = kindOf(t.type);
    // Some browsers give float16 as an array type of its own; we hold its bits.
    const own = data instanceof (array as unknown as new () => object)
      ? data
      : new array(data.buffer as ArrayBuffer, data.byteOffset, data.length);
    return { dtype: t.type, dims: t.dims, data: own };
  }
}

async function load(device: Device, url: string | undefined): Promise<OrtModule> {
  if (url !== undefined) return module(await import(/* @vite-ignore */ url));
  const name = device === "node" ? "onnxruntime-node" : "onnxruntime-web";
  try {
    // By a name that bundlers do not see: pages need neither of these.
    if (inNode()) return module(await import(/* @vite-ignore */ name));
    if (device === "webgpu") return module(await import("onnxruntime-web/webgpu"));
    return module(await import("onnxruntime-web/wasm"));
  } catch (error) {
    throw new RuntimeError(
      `${name} cannot be loaded: ${(error as Error).message}\nhint: npm install ${name}` +
        (device === "node" ? "" : ", or give runtimeUrl"),
    );
  }
}

/** CommonJS modules have all under `default`. */
const module = (found: unknown): OrtModule => {
  const it = found as OrtModule & { default?: OrtModule };
  return it.InferenceSession ? it : it.default!;
};

/** Says why WebGPU cannot be used here, or nothing if it can. */
export async function webgpuProblem(): Promise<string | undefined> {
  const gpu = (globalThis.navigator as { gpu?: { requestAdapter(): Promise<unknown> } } | undefined)?.gpu;
  if (!gpu) return "this browser has no WebGPU";
  try {
    return (await gpu.requestAdapter()) ? undefined : "no GPU adapter was found";
  } catch (error) {
    return (error as Error).message;
  }
}
