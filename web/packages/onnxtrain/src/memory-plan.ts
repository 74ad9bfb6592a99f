/** Memory estimate, available before training starts. */
import { count, type HostTensor, kindOf } from "./dtypes.js";
import { TooLargeError } from "./errors.js";
import type { Manifest, TensorSpec } from "./manifest.js";
import type { Device } from "./runtime.js";

/** Estimated memory of training in a tab, in bytes. */
export interface MemoryPlan {
  /** Bytes by purpose. */
  readonly parts: Readonly<Record<string, number>>;
  /** Bytes in WebAssembly's memory, which is limited to 4 GB. */
  readonly heap: number;
  /** Bytes inside and outside of WebAssembly's memory. */
  readonly total: number;
  readonly limit: number;
  readonly fits: boolean;
}

/** Address space of 32-bit WebAssembly. */
export const WASM_LIMIT = 2 ** 32 - 2 ** 16;

/** Measured in Chromium: bytes of the runtime without a model, and bytes of a session per node. */
const RUNTIME = 40e6;
const NODE = 11e3;
/** Allocator fragmentation, relative to the size of activations. */
const FRAGMENTATION = 1.15;

interface BuildEstimate {
  readonly constants: number;
  readonly nodes: number;
  readonly results: readonly Readonly<Record<string, number>>[];
}

/**
 * Estimates the memory of a step on wasm. `sizes` gives the symbolic sizes of a batch by their names in the manifest;
 * missing ones count as 1. Returns `undefined` if the artifacts were not built for the web.
 */
export function planMemory(manifest: Manifest, sizes: Readonly<Record<string, number>> = {}, limit = WASM_LIMIT): MemoryPlan | undefined {
  const estimate = manifest.options["memory"] as BuildEstimate | undefined;
  if (!estimate) return undefined;
  const bytes = (w: { dtype: string; shape: readonly number[] }) => count(w.shape) * kindOf(w.dtype).size;
  const values = [...manifest.parameters, ...manifest.buffers, ...manifest.state].reduce((sum, w) => sum + bytes(w), 0);
  const at = (terms: Readonly<Record<string, number>>) =>
    Object.entries(terms).reduce((sum, [product, n]) => sum + n * product.split("*").reduce((p, s) => p * (sizes[s] ?? 1), 1), 0);
  const parts = {
    "runtime and session": RUNTIME + NODE * estimate.nodes,
    "frozen weights": estimate.constants,
    // Each call copies them in and returns new ones.
    "parameters and state": 2 * values,
    activations: Math.round(FRAGMENTATION * Math.max(0, ...estimate.results.map(at))),
  };
  const heap = Object.values(parts).reduce((a, b) => a + b, 0);
  const outside = 2 * values;
  return { parts: { ...parts, "parameters and state outside the runtime": outside }, heap, total: heap + outside, limit, fits: heap <= limit };
}

/** Returns the values of the symbolic sizes in a batch. */
export function sizesIn(specs: readonly TensorSpec[], batch: ReadonlyMap<string, HostTensor>): Record<string, number> {
  return Object.fromEntries(specs.flatMap((s) => s.shape.map((dim, axis) => [dim, batch.get(s.name)?.dims[axis] ?? 1])));
}

/** Throws if a step needs more memory than the device has; `limit` may be infinite. */
export function checkMemory(manifest: Manifest, device: Device, sizes: Readonly<Record<string, number>>, limit = WASM_LIMIT): void {
  const plan = device === "wasm" ? planMemory(manifest, sizes, limit) : undefined;
  if (!plan || plan.fits) return;
  const mb = (n: number) => `${Math.ceil(n / 1e6)} MB`;
  const [most] = Object.entries(plan.parts).sort(([, a], [, b]) => b - a);
  const at = Object.entries(sizes).filter(([n]) => !/^\d+$/.test(n)).map(([n, v]) => `${n} = ${v}`).join(", ");
  throw new TooLargeError(
    `training needs about ${mb(plan.heap)}${at ? ` with ${at}` : ""}, the limit is ${mb(plan.limit)}; ` +
      `the largest part is ${most![0]}: ${mb(most![1])}\n` +
      "hint: use smaller batches, build with --recompute auto, or set memoryLimit: Infinity to try anyway",
  );
}
