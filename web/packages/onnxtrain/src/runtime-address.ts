/** Where a page has ONNX Runtime, for workers: they have no import map, and no bundler sees into them. */
import type { Device, RuntimeOptions } from "./runtime.js";

type Address = Pick<RuntimeOptions, "runtimeUrl" | "wasmPaths">;

/** Gives the addresses that were given or can be found; `undefined` if nothing tells. */
export async function addressOf(device: Device, { runtimeUrl, wasmPaths }: Address): Promise<Address | undefined> {
  // A worker's own address is no base: it has no folder.
  const absolute = (url: string) => new URL(url, globalThis.location?.href).href;
  const paths = typeof wasmPaths === "string" ? absolute(wasmPaths) : wasmPaths && { wasm: absolute(wasmPaths.wasm) };
  if (runtimeUrl !== undefined) return { runtimeUrl: absolute(runtimeUrl), wasmPaths: paths };
  const mapped = resolved(device);
  if (mapped !== undefined) return { runtimeUrl: mapped, wasmPaths: paths };
  const { module, wasm } = device === "webgpu" ? bundledForGpu() : bundled();
  // A bundler puts the addresses of its copies in place of these names, or leaves them.
  if (!NAMED.test(module.pathname) && !NAMED.test(wasm.pathname)) return { runtimeUrl: module.href, wasmPaths: paths ?? { wasm: wasm.href } };
  const beside = await besideUs(device, module);
  return beside === undefined ? undefined : { runtimeUrl: beside, wasmPaths: paths };
}

const NAMED = /\/onnxruntime-web\/(wasm|webgpu|ort-wasm[^/]*)$/;

/** Gives the module in the folder of packages that this one lies in, where a server of packages has it. */
async function besideUs(device: Device, named: URL): Promise<string | undefined> {
  if (!/\/onnxtrain\/dist\/(parts\/)?onnxruntime-web\//.test(named.pathname)) return undefined;
  const folder = named.pathname.replace(/\/onnxtrain\/dist\/.*/, "/onnxruntime-web/dist");
  const url = new URL(`${folder}/ort.${device === "webgpu" ? "webgpu" : "wasm"}.bundle.min.mjs`, named);
  try {
    const answer = await fetch(url, { method: "HEAD" });
    // Some servers answer everything with a page.
    return answer.ok && answer.headers.get("Content-Type")?.includes("javascript") ? url.href : undefined;
  } catch {
    return undefined;
  }
}

/** Gives what an import map says. */
function resolved(device: Device): string | undefined {
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
