/** What every error of this package is. */
export class OnnxTrainError extends Error {
  override name = "OnnxTrainError";
}

/** The manifest is not what this version reads. */
export class ManifestError extends OnnxTrainError {
  override name = "ManifestError";
}

/** A file of the artifacts is missing, damaged or not the one that the manifest names. */
export class ArtifactError extends OnnxTrainError {
  override name = "ArtifactError";
}

/** A checkpoint is damaged or belongs to other artifacts. */
export class CheckpointError extends OnnxTrainError {
  override name = "CheckpointError";
}

/** A tensor does not fit; the message names it and what was expected. */
export class ShapeError extends OnnxTrainError {
  override name = "ShapeError";
}

/** The loss of a batch is infinite or NaN; the weights are those before that step. */
export class NonFiniteError extends OnnxTrainError {
  override name = "NonFiniteError";
}

/** ONNX Runtime is not there, or cannot do what was asked. */
export class RuntimeError extends OnnxTrainError {
  override name = "RuntimeError";
}

/** Memory ran out; what was saved before is intact. */
export class OutOfMemoryError extends RuntimeError {
  override name = "OutOfMemoryError";
}

/** Training would take more memory than there is; nothing was started. */
export class TooLargeError extends OnnxTrainError {
  override name = "TooLargeError";
}

/** The GPU is gone, and what was on it; what was saved before is intact. */
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

/** Gives an error of the same kind from its name, for errors that crossed a thread. */
export function revive(name: string, message: string): Error {
  const Kind = KINDS.find((k) => new k().name === name);
  if (Kind) return new Kind(message);
  const error = name === "OnnxTrainError" ? new OnnxTrainError(message) : new Error(message);
  error.name = name;
  return error;
}
