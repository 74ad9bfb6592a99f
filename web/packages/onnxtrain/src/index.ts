export { Artifacts, type ArtifactSource, type LoadOptions } from "./artifacts.js";
export type { BatchOptions, Dataset } from "./data.js";
export { checkLabels } from "./validation.js";
export type { HostTensor, TypedArray } from "./dtypes.js";
export {
  ArtifactError, CheckpointError, DeviceLostError, DisposedError, ManifestError, NonFiniteError, OnnxTrainError,
  OutOfMemoryError, RuntimeError, ShapeError, TooLargeError,
} from "./errors.js";
export type { Batch, TensorLike } from "./feeds.js";
export { createHead } from "./head/create-head.js";
export type { Activation } from "./head/layers.js";
export type { HeadLoss } from "./head/losses.js";
export type { HeadOptimizer } from "./head/optimizers.js";
export type { HeadOptions } from "./head/create-head.js";
export {
  parseManifest, type Location, type Manifest, type ModelSpec, type StateSpec, type TensorSpec, type WeightSpec,
} from "./manifest.js";
export { readModel, type ModelGraph, type ModelNode, type ModelValue, type ModelWeight, type OnnxModel } from "./onnx-model.js";
export { planMemory, type MemoryPlan } from "./memory-plan.js";
export { ReplayBuffer, type Columns, type ReplayOptions } from "./replay.js";
export type { Device, RuntimeOptions } from "./runtime.js";
export { readCheckpoint, writeCheckpoint, type Checkpoint, type Meta } from "./checkpoint.js";
export { constant, cosine, linear, stepwise, warmup, type Schedule } from "./schedules.js";
export { databaseStore, fileStore, privateFileStore, type CheckpointStore } from "./storage.js";
export {
  Trainer, type FitOptions, type Metrics, type Outputs, type Progress, type StepResult, type TrainerOptions,
} from "./trainer.js";
export { forgetWeights, type LoadProgress } from "./weights-file.js";
export { TrainingSession, type TrainingSessionCreateOptions, type UriOrBuffer } from "./training-session.js";
