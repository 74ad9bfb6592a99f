/** How much memory training takes, told before it starts. */
import { kindOf, count, type HostTensor } from "./dtypes.js";
import { TooLargeError } from "./errors.js";
import type { Manifest, TensorSpec } from "./manifest.js";
import type { Device } from "./runtime.js";

/** What training takes in a tab, in bytes. */
export interface MemoryPlan {
  /** By what it is for. */
  readonly parts: Readonly<Record<string, number>>;
  /** What lies in WebAssembly's memory, which has an end at 4 GB. */
  readonly heap: number;
  /** Everything. */
  readonly total: number;
  readonly limit: number;
  readonly fits: boolean;
}

/** What WebAssembly can address. */
export const WASM_LIMIT = 2 ** 32 - 2 ** 16;

/** Measured in Chromium: what the runtime takes without a model, and what a session keeps for a node. */
const RUNTIME = 40e6;
const NODE = 11e3;
/** Of what results take, for the gaps that an allocator leaves. */
const GAPS = 1.15;

interface Noted {
  readonly constants: number;
  readonly nodes: number;
  readonly results: readonly Readonly<Record<string, number>>[];
}

/**
 * Gives what a step takes on wasm with batches of these sizes, by the names that the manifest has
 * for them; others count as one. `undefined` where artifacts were not built for the web.
 */
export function planMemory(manifest: Manifest, sizes: Readonly<Record<string, number>> = {}, limit = WASM_LIMIT): MemoryPlan | undefined {
  const noted = manifest.options["memory"] as Noted | undefined;
  if (!noted) return undefined;
  const bytes = (w: { dtype: string; shape: readonly number[] }) => count(w.shape) * kindOf(w.dtype).size;
  const values = [...manifest.parameters, ...manifest.buffers, ...manifest.state].reduce((sum, w) => sum + bytes(w), 0);
  const at = (terms: Readonly<Record<string, number>>) =>
    Object.entries(terms).reduce((sum, [product, n]) => sum + n * product.split("*").reduce((p, s) => p * (sizes[s] ?? 1), 1), 0);
  const parts = {
    "runtime and session": RUNTIME + NODE * noted.nodes,
    "frozen weights": noted.constants,
    // Each call copies them in and gives back new ones.
    "parameters and state": 2 * values,
    "results of the step": Math.round(GAPS * Math.max(0, ...noted.results.map(at))),
  };
  const heap = Object.values(parts).reduce((a, b) => a + b, 0);
  const outside = 2 * values;
  return { parts: { ...parts, "parameters and state outside the runtime": outside }, heap, total: heap + outside, limit, fits: heap <= limit };
}

/** Gives the numbers that symbolic sizes stand for in a batch. */
export function sizesIn(specs: readonly TensorSpec[], batch: ReadonlyMap<string, HostTensor>): Record<string, number> {
  return Object.fromEntries(specs.flatMap((s) => s.shape.map((dim, axis) => [dim, batch.get(s.name)?.dims[axis] ?? 1])));
}

/** Refuses what the device cannot hold; `limit` may be infinite. */
export function checkMemory(manifest: Manifest, device: Device, sizes: Readonly<Record<string, number>>, limit = WASM_LIMIT): void {
  const plan = device === "wasm" ? planMemory(manifest, sizes, limit) : undefined;
  if (!plan || plan.fits) return;
  const mb = (n: number) => `${Math.ceil(n / 1e6)} MB`;
  const [most] = Object.entries(plan.parts).sort(([, a], [, b]) => b - a);
  const at = Object.entries(sizes).filter(([n]) => !/^\d+$/.test(n)).map(([n, v]) => `${n} = ${v}`).join(", ");
  throw new TooLargeError(
    `training takes about ${mb(plan.heap)}${at ? ` at ${at}` : ""}, more than the ${mb(plan.limit)} that the runtime can have; ` +
      `most of it is for the ${most![0]}: ${mb(most![1])}\n` +
      "hint: smaller batches, build(recompute='auto') or a smaller model; memoryLimit: Infinity tries it anyway",
  );
}
