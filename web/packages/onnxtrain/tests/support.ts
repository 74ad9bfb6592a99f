import { execFileSync } from "node:child_process";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { readCheckpoint } from "../src/checkpoint.js";
import type { Batch } from "../src/feeds.js";
import type { HostTensor } from "../src/dtypes.js";

export const ROOT = fileURLToPath(new URL("../../../..", import.meta.url)).replace(/\/$/, "");
export const FIXTURES = `${ROOT}/web/.fixtures`;

/** Returns the Python interpreter that has onnxtrain installed: `PYTHON`, or the repository's `.venv`. */
export function python(): string {
  const own = `${ROOT}/.venv/bin/python`;
  return process.env["PYTHON"] ?? (existsSync(own) ? own : "python3");
}

/** Runs a Python program and returns its output. */
export const runPython = (code: string, ...args: string[]): string =>
  execFileSync(python(), ["-c", code, ...args], { encoding: "utf8" });

export interface Expected {
  readonly losses: number[];
  readonly accuracies: number[];
  readonly eval: number;
  readonly inputs: [string, string];
  readonly seed: number;
}

export interface Fixture {
  readonly name: string;
  readonly folder: string;
  readonly expected: Expected;
  readonly batches: Batch[];
  readonly predictions: ReadonlyMap<string, HostTensor>;
}

export const bytes = (path: string): Uint8Array => new Uint8Array(readFileSync(path));

/** Loads one of the directories that `make_fixtures.py` wrote. */
export async function fixture(name: string): Promise<Fixture> {
  const folder = `${FIXTURES}/${name}`;
  const expected = JSON.parse(readFileSync(`${folder}/expected.json`, "utf8")) as Expected;
  const { tensors } = await readCheckpoint(bytes(`${folder}/batches.safetensors`));
  const batches = expected.losses.map((_, i) =>
    Object.fromEntries(expected.inputs.map((n) => [n, tensors.get(`${i}/${n}`)!])),
  );
  const predictions = (await readCheckpoint(bytes(`${folder}/predictions.safetensors`))).tensors;
  return { name, folder, expected, batches, predictions };
}

export const MODELS = ["mlp", "mlp-frozen", "cnn", "transformer", "gru"];

/** Returns all files of a directory by name. */
export const filesOf = (folder: string): Map<string, Uint8Array> =>
  new Map(readdirSync(folder).map((name) => [name, bytes(`${folder}/${name}`)]));

/** Returns the largest absolute difference of two arrays; Infinity if their lengths differ. */
export const distance = (a: ArrayLike<number>, b: ArrayLike<number>): number => {
  if (a.length !== b.length) return Infinity;
  return Math.max(...Array.from(a, (v, i) => Math.abs(v - b[i]!)));
};
