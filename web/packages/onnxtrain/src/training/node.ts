/** The same module in Node, where `TrainingSession` runs on onnxruntime-node. */
import * as ort from "onnxruntime-node";
import { TrainingSession } from "../training-session.js";

export * from "onnxruntime-node";
export { TrainingSession, type TrainingSessionCreateOptions, type UriOrBuffer } from "../training-session.js";
export type TrainingSessionFactory = typeof TrainingSession;
export default { ...ort, TrainingSession };
