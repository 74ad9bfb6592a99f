/** What the runtime throws, told apart: memory, the GPU, anything else. */
import { DeviceLostError, OnnxTrainError, OutOfMemoryError, RuntimeError } from "./errors.js";

const MEMORY = /bad_alloc|out of memory|out-of-memory|failed to allocate|allocation failed|memory\.grow|memory access out of bounds|invalid (typed )?array (buffer )?length|tensor shape is too large|exceeds the max(imum)? buffer size/i;
const LOST = /device (was|is|has been) (lost|destroyed)|device.?lost|lost device|instance (was )?dropped|external instance reference/i;

/** Gives an error of ours for what a runtime threw; `where` names the model and the device. */
export function failed(error: unknown, where: string): OnnxTrainError {
  if (error instanceof OnnxTrainError) return error;
  // Exceptions of C++ that wasm cannot read come as bare numbers, nearly always for want of memory.
  if (typeof error === "number") return outOfMemory(where, `the runtime failed with code ${error}`);
  const message = (error instanceof Error ? error.message : String(error)).trim();
  if (LOST.test(message)) return deviceLost(where, message);
  if (MEMORY.test(message) || (error instanceof RangeError && /length|allocat/i.test(message))) return outOfMemory(where, message);
  return new RuntimeError(`${where}: ${message}`);
}

const outOfMemory = (where: string, why: string): OutOfMemoryError =>
  new OutOfMemoryError(
    `${where}: memory ran out: ${why}\nhint: take smaller batches or a smaller model; what was saved is intact`,
  );

/** Gives the error for a GPU that is gone. */
export const deviceLost = (where: string, why: string): DeviceLostError =>
  new DeviceLostError(
    `${where}: the GPU was lost: ${why}\nhint: make a new Trainer and load() the last checkpoint; what was saved is intact`,
  );
