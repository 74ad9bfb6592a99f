
/** Base class of all errors of this package. */
export class OnnxTrainError extends Error {
  override name = "OnnxTrainError";
}

/** The manifest is invalid or has another format version. */
export class ManifestError extends OnnxTrainError {
  override name = "ManifestError";
}

/** A file of the artifacts is missing, damaged or does not match its sha256 in the manifest. */
export class ArtifactError extends OnnxTrainError {
  override name = "ArtifactError";
}

/** A checkpoint is damaged or belongs to other artifacts. */
export class CheckpointError extends OnnxTrainError {
  override name = "CheckpointError";
}

/** A tensor has the wrong shape, dtype or values; the message names it and what was expected. */
export class ShapeError extends OnnxTrainError {
  override name = "ShapeError";
}

/** The loss of a batch is infinite or NaN; the weights are unchanged since the previous step. */
export class NonFiniteError extends OnnxTrainError {
  override name = "NonFiniteError";
}

/** ONNX Runtime is not installed, or failed. */
export class RuntimeError extends OnnxTrainError {
  override name = "RuntimeError";
}

/** Out of memory; saved checkpoints are intact. */
export class OutOfMemoryError extends RuntimeError {
  override name = "OutOfMemoryError";
}

/** Training would need more memory than is available; nothing was started. */
export class TooLargeError extends OnnxTrainError {
  override name = "TooLargeError";
}

/** The GPU device was lost with its memory; saved checkpoints are intact. */
export class DeviceLostError extends RuntimeError {
  override name = "DeviceLostError";
}

/** The trainer was used after `dispose()`. */
export class DisposedError extends OnnxTrainError {
  override name = "DisposedError";
}

const KINDS = [
  ManifestError, ArtifactError, CheckpointError, ShapeError, NonFiniteError, RuntimeError, OutOfMemoryError,
  TooLargeError, DeviceLostError, DisposedError,
] as const;

/** Restores an error of the same class from its name, for errors that come from a worker. */
export function revive(name: string, message: string): Error {
  const Kind = KINDS.find((k) => new k().name === name);
  if (Kind) return new Kind(message);
  const error = name === "OnnxTrainError" ? new OnnxTrainError(message) : new Error(message);
  error.name = name;
  return error;
}

// Messages of ONNX Runtime, browsers and drivers, by cause.

const MEMORY = /bad_alloc|out of memory|out-of-memory|wrapRuntimeError to allocate|allocation wrapRuntimeError|memory\.grow|memory access out of bounds|invalid (typed )?array (buffer )?length|tensor shape is too large|exceeds the max(imum)? buffer size/i;
const LOST = /device (was|is|has been) (lost|destroyed)|device.?lost|lost device|instance (was )?dropped|external instance reference/i;

/** Wraps an error of the runtime; `where` names the model and the device. */
export function wrapRuntimeError(error: unknown, where: string): OnnxTrainError {
  if (error instanceof OnnxTrainError) return error;
  // C++ exceptions that wasm cannot decode arrive as bare numbers; nearly all of them are std::bad_alloc.
  if (typeof error === "number") return outOfMemory(where, `the runtime failed with code ${error}`);
  const message = (error instanceof Error ? error.message : String(error)).trim();
  if (LOST.test(message)) return deviceLost(where, message);
  if (MEMORY.test(message) || (error instanceof RangeError && /length|allocat/i.test(message))) return outOfMemory(where, message);
  return new RuntimeError(`${where}: ${message}`);
}

const outOfMemory = (where: string, why: string): OutOfMemoryError =>
  new OutOfMemoryError(
    `${where}: out of memory: ${why}\nhint: use smaller batches or a smaller model; saved checkpoints are intact`,
  );

/** Returns the error for a lost GPU device. */
export const deviceLost = (where: string, why: string): DeviceLostError =>
  new DeviceLostError(
    `${where}: the GPU device was lost: ${why}\nhint: create a new Trainer and load() the last checkpoint; saved checkpoints are intact`,
  );
