export { FlowerError } from "./wire.js";
export { exportKey, importKey, newKey, publicKeyLine } from "./connection.js";
export type { Traffic } from "./connection.js";
export type { RoundSettings } from "./local-round.js";
export { FlowerNode, type FlowerNodeOptions, type RoundReport } from "./node.js";
export { databaseNodeStore, fileNodeStore, memoryNodeStore, type NodeStore } from "./node-store.js";
export type { RecordValue, Scalar, Values } from "./messages.js";
