/** What `onnxruntime-web/training` exported: ONNX Runtime and `TrainingSession`. Alias the old name to this module. */
import * as ort from "onnxruntime-web/wasm";
import { TrainingSession } from "../training-session.js";

export * from "onnxruntime-web/wasm";
export { TrainingSession, type TrainingSessionCreateOptions, type UriOrBuffer } from "../training-session.js";
export type TrainingSessionFactory = typeof TrainingSession;
export default { ...ort, TrainingSession };
