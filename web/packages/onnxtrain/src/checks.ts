/** Settings of a run, refused by name before anything is trained. */
import { isColumns, type Dataset } from "./data.js";
import { checkLabels } from "./diagnosis.js";
import { OnnxTrainError } from "./errors.js";
import type { Manifest } from "./manifest.js";
import type { FitOptions } from "./trainer-types.js";

const refused = (what: string, expected: string, value: unknown): OnnxTrainError =>
  new OnnxTrainError(`${what} must be ${expected}, got ${typeof value === "number" ? value : (JSON.stringify(value) ?? typeof value)}`);

/** Refuses numbers of epochs, rows or steps that are none, and labels that are no class. */
export function checkFit(manifest: Manifest, data: Dataset, options: FitOptions): void {
  for (const name of ["epochs", "batchSize", "stepsPerCall"] as const) {
    const value: unknown = options[name];
    if (value !== undefined && !(Number.isSafeInteger(value) && (value as number) >= 1)) {
      throw refused(`'${name}'`, "a whole number from 1 on", value);
    }
  }
  if (isColumns(data)) checkLabels(manifest, data);
}

/** Gives a learning rate back, if it is one. */
export function checkedRate(value: unknown): number {
  if (typeof value === "number" && value >= 0 && Number.isFinite(value)) return value;
  throw refused("the learning rate", "a number from 0 on", value);
}
