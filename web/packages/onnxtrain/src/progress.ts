/** How far a run had come, as checkpoints say it. */
import { CheckpointError } from "./errors.js";
import { compact, entries, float, join, write } from "./json-text.js";
import type { Meta } from "./safetensors.js";

type Properties = Readonly<Record<string, number | string>>;

export interface RunProgress {
  readonly lr: number | undefined;
  readonly step: number;
  readonly seed: number | undefined;
  readonly properties: Properties;
}

/** Gives a run's progress from the metadata of its checkpoint; refuses values that cannot be. */
export function readProgress(meta: Meta, label: string): RunProgress {
  const value = <T>(key: string, fits: (v: unknown) => boolean, what: string): T | undefined => {
    const text = meta.get(key);
    if (text === undefined || text === "null") return undefined;
    const found: unknown = JSON.parse(text);
    if (!fits(found)) throw new CheckpointError(`${label}: the metadata is damaged: '${key}' is ${text.slice(0, 60)}, expected ${what}`);
    return found as T;
  };
  const whole = (v: unknown) => Number.isSafeInteger(v) && (v as number) >= 0;
  return {
    lr: value("lr", (v) => typeof v === "number", "a number"),
    step: value<number>("step", whole, "a whole number") ?? 0,
    seed: value("seed", whole, "a whole number"),
    properties: value<Properties>("properties", (v) => typeof v === "object" && !Array.isArray(v), "an object") ?? {},
  };
}

/** Gives the metadata for a run's progress; what `old` has in other words for the same values is kept. */
export function writeProgress(old: Meta, run: RunProgress & { readonly lr: number }, manifest: string): Meta {
  const text = old.get("properties");
  const before = text ? entries(compact(text)) : new Map<string, string>();
  const properties = Object.entries(run.properties).map(([name, value]) => {
    const known = before.get(name);
    return [name, known !== undefined && JSON.parse(known) === value ? known : write(value)] as const;
  });
  return new Map([
    ...old,
    ["lr", float(run.lr)],
    ["manifest", manifest],
    ["properties", join(new Map(properties))],
    ["seed", String(run.seed)],
    ["step", String(run.step)],
  ]);
}
