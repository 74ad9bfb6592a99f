/** WebGPU of Dawn as pages have it, and what Node needs beside. */
import { register } from "node:module";
import { create, globals } from "webgpu";

register("./resolve.mjs", import.meta.url);
Object.assign(globalThis, globals);
// Which GPU and which of Dawn's switches: DAWN="adapter=NVIDIA H200,backend=vulkan".
const gpu = create(process.env.DAWN?.split(",") ?? []);
Object.defineProperty(globalThis, "navigator", { value: { gpu, userAgent: "Node", platform: "Linux" }, configurable: true });

/** ONNX Runtime's memory is shared, which Dawn's bindings for Node do not take: they get a copy. */
function takeSharedMemory() {
  const queue = globalThis.GPUQueue.prototype;
  const own = queue.writeBuffer;
  queue.writeBuffer = function (buffer, offset, data, start = 0, size = undefined) {
    const shared = data instanceof SharedArrayBuffer || data.buffer instanceof SharedArrayBuffer;
    if (!shared) return size === undefined ? own.call(this, buffer, offset, data, start) : own.call(this, buffer, offset, data, start, size);
    const unit = data.BYTES_PER_ELEMENT ?? 1;
    const from = (data.byteOffset ?? 0) + start * unit;
    const bytes = size === undefined ? data.byteLength - start * unit : size * unit;
    return own.call(this, buffer, offset, new Uint8Array(data.buffer ?? data, from, bytes).slice());
  };
}

/** Node's event loop waits long for pipelines that are compiled beside it: they are compiled at once. */
function compileAtOnce() {
  globalThis.GPUDevice.prototype.createComputePipelineAsync = async function (wanted) {
    return this.createComputePipeline(wanted);
  };
}

let dispatches = 0;
/** Gives how many kernels were started so far. */
export const dispatched = () => dispatches;

function countDispatches() {
  const pass = globalThis.GPUComputePassEncoder?.prototype;
  for (const name of ["dispatchWorkgroups", "dispatchWorkgroupsIndirect"]) {
    const own = pass?.[name];
    if (!own) continue;
    pass[name] = function (...args) {
      dispatches++;
      return own.apply(this, args);
    };
  }
}

/** Gives the name of the GPU, and whether it is one in software; throws where there is none. */
export async function openGpu() {
  const adapter = await gpu.requestAdapter();
  if (!adapter) throw new Error("Dawn found no usable GPU");
  const { vendor, architecture, description, device, isFallbackAdapter } = adapter.info;
  takeSharedMemory();
  compileAtOnce();
  countDispatches();
  const named = [vendor, architecture, device, description].filter(Boolean).join(", ");
  return { adapter: named, software: !!isFallbackAdapter || /swiftshader|llvmpipe/i.test(named) };
}
