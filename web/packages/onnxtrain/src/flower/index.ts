export { FlowerError } from "./errors.js";
export { exportKey, importKey, newKey, publicKeyLine } from "./keys.js";
export type { Traffic } from "./link.js";
export type { RoundSettings } from "./local-round.js";
export { FlowerNode, type FlowerNodeOptions, type RoundReport } from "./node.js";
export { databaseNodeStore, fileNodeStore, memoryNodeStore, type NodeStore } from "./node-store.js";
export type { RecordValue, Scalar, Values } from "./records.js";
