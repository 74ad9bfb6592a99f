/** One system in a process of its own, which is asked by messages: first to open, then to train. */
import { readFileSync } from "node:fs";
import { register } from "node:module";
import { join } from "node:path";
import { create, globals } from "webgpu";
import { task } from "../systems/task.js";

register("./resolve.mjs", import.meta.url);
Object.assign(globalThis, globals);
// Which GPU and which of Dawn's switches: DAWN="adapter=NVIDIA H200,backend=vulkan".
const gpu = create(process.env.DAWN?.split(",") ?? []);
Object.defineProperty(globalThis, "navigator", { value: { gpu, userAgent: "Node", platform: "Linux" }, configurable: true });

const runtimes = {
  ours: () => undefined,
  jax: () => undefined,
  tfjs: async () => {
    // Its WebGPU asks whether this is a page.
    globalThis.window = globalThis;
    globalThis.tf = (await import("@tensorflow/tfjs")).default;
    await import("@tensorflow/tfjs-backend-webgpu");
  },
};

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

let system;
let wanted;
async function open({ work, model, file, ...settings }) {
  const adapter = await gpu.requestAdapter();
  if (!adapter) throw new Error("there is no GPU that Dawn can use");
  const { vendor, architecture, description, device, isFallbackAdapter } = adapter.info;
  takeSharedMemory();
  compileAtOnce();
  countDispatches();
  await runtimes[file]();
  const base = `${join(work, model)}/`;
  const bytes = (name) => new Uint8Array(readFileSync(base + name)).buffer;
  const given = await task(model, base, bytes);
  const runtimeUrl = import.meta.resolve("onnxruntime-web/webgpu");
  system = await (await import(`../systems/${file}.js`)).prepare(given, { ...settings, model, runtimeUrl });
  wanted = given.losses[system.losses];
  const named = [vendor, architecture, device, description].filter(Boolean).join(", ");
  return { adapter: named, software: !!isFallbackAdapter || /swiftshader|llvmpipe/i.test(named) };
}

async function train(steps) {
  const [before, busy, began] = [dispatches, process.cpuUsage(), performance.now()];
  const losses = await system.train(steps);
  const ms = (performance.now() - began) / steps;
  const { user, system: kernel } = process.cpuUsage(busy);
  return { losses: Array.from(losses), ms, cpu: (user + kernel) / 1000 / steps, dispatches: (dispatches - before) / steps, wanted };
}

process.on("message", (m) => {
  Promise.resolve(m.open ? open(m.open) : train(m.steps)).then(
    (answer) => process.send(answer),
    (error) => process.send({ failed: String(error?.message ?? error).split("\n")[0] || "an error without a text" }),
  );
});
process.on("disconnect", () => process.exit(0));
