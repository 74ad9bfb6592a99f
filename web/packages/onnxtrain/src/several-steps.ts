/** Several batches in one call of the runtime. */
import type { HostTensor, TypedArray } from "./dtypes.js";
import type { Tensors } from "./engine.js";
import { findModel, type Manifest } from "./manifest.js";
import { TARGETS, type Device } from "./runtime.js";

/** Gives how many batches one call takes on a device: 1 where artifacts or device have no such model. */
export function stepsPerCall(manifest: Manifest, device: Device): number {
  // A GPU keeps parameters and state anyway.
  if (device === "webgpu" || manifest.accumulate !== 1) return 1;
  const counts = manifest.models.filter((m) => m.role === "step").map((m) => m.steps_per_call);
  const most = Math.max(1, ...counts);
  const there = findModel(manifest, "step", TARGETS[device], most);
  return there && there.target === findModel(manifest, "step", TARGETS[device])?.target ? most : 1;
}

/** Gives `count` batches of equal sizes at a time, and one by one those that are left over. */
export async function* grouped(batches: AsyncIterable<Tensors>, count: number): AsyncGenerator<Tensors[]> {
  let waiting: Tensors[] = [];
  for await (const batch of batches) {
    if (waiting.length && sizes(batch) !== sizes(waiting[0]!)) {
      yield* waiting.map((b) => [b]);
      waiting = [];
    }
    waiting.push(batch);
    if (waiting.length === count) {
      yield waiting;
      waiting = [];
    }
  }
  yield* waiting.map((b) => [b]);
}

const sizes = (batch: Tensors): string => [...batch.values()].map((t) => t.dims.join()).join(";");

/** Gives one batch with a leading axis from batches of equal sizes, in memory that `old` leaves behind. */
export function stacked(batches: readonly Tensors[], old?: Tensors): Map<string, HostTensor> {
  const found = new Map<string, HostTensor>();
  for (const [name, { dtype, dims, data }] of batches[0]!) {
    const size = data.length;
    const spare = old?.get(name)?.data;
    const fits = spare?.length === size * batches.length && spare.constructor === data.constructor;
    const all = fits ? spare : new (data.constructor as new (n: number) => Float32Array)(size * batches.length);
    batches.forEach((b, i) => (all as Float32Array).set(b.get(name)!.data as Float32Array, i * size));
    found.set(name, { dtype, dims: [batches.length, ...dims], data: all as TypedArray });
  }
  return found;
}

/** Gives what one step of several found. */
export function nth(found: Tensors, at: number): Map<string, HostTensor> {
  return new Map(
    [...found].map(([name, { dtype, dims, data }]) => {
      const size = data.length / dims[0]!;
      return [name, { dtype, dims: dims.slice(1), data: data.slice(at * size, (at + 1) * size) as TypedArray }];
    }),
  );
}
