import { Artifacts } from "./artifacts.js";
import { LocalEngine, type Engine, type Tensors } from "./engine.js";
import { RuntimeError } from "./errors.js";
import { findModel, type ModelRole } from "./manifest.js";
import { WorkerEngine } from "./remote.js";
import { addressOf } from "./runtime-address.js";
import { inNode, TARGETS, webgpuProblem, type Device } from "./runtime.js";
import type { TrainerOptions } from "./trainer-types.js";

/** Opens an engine on the device asked for, or says why it is another one. */
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
  tell(options, `WebGPU is not used, training runs on ${fallback}: ${problem}`);
  return await open(artifacts, fallback, roles, values, options);
}

const tell = ({ onMessage = (message: string) => console.warn(message) }: TrainerOptions, message: string): void =>
  onMessage(`onnxtrain: ${message}`);

async function open(
  artifacts: Artifacts, device: Device, roles: readonly ModelRole[], values: Tensors, options: TrainerOptions,
): Promise<Engine> {
  const inWorker = (options.worker ?? true) && !inNode() && typeof Worker === "function";
  const address = inWorker && (await addressOf(device, options));
  if (address) return await WorkerEngine.create(artifacts, device, roles, values, { ...options, ...address });
  if (inWorker) tell(options, "training runs in the page itself: a worker cannot find ONNX Runtime here\nhint: give runtimeUrl");
  return await LocalEngine.create(artifacts, device, roles, values, options);
}
