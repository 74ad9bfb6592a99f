export { exportOnnxAdapter, exportPeft, type PeftFiles, type PeftOptions } from "./adapters.js";
export { generate, generateText, type GenerateOptions, type TextOptions, type TokenizerLike } from "./generate.js";
export { LanguageModel, type LanguageModelOptions } from "./language-model.js";
export { tokenBatch, type TokenBatchOptions, type TokenRow } from "./token-batch.js";
