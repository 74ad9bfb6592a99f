/** What a trainer is given, and what it gives. */
import type { Artifacts, ArtifactSource, LoadOptions } from "./artifacts.js";
import type { BatchOptions, Dataset } from "./data.js";
import type { HostTensor } from "./dtypes.js";
import type { RuntimeOptions } from "./runtime.js";
import type { Schedule } from "./schedules.js";
import type { CheckpointStore } from "./storage.js";

export interface TrainerOptions extends RuntimeOptions, Pick<LoadOptions, "cache" | "onProgress"> {
  readonly artifacts: ArtifactSource | Artifacts;
  readonly prefix?: string;
  /** Train in a worker, so that the page stays live: so it is in pages unless this is `false`. */
  readonly worker?: boolean;
  /** Of dropout masks and of the order of the data; below 2^24. */
  readonly seed?: number;
  readonly store?: CheckpointStore;
  /** Sizes that batches will have, by the manifest's names: what cannot be held is refused before anything is fetched. */
  readonly sizes?: Readonly<Record<string, number>>;
  /** Told what happens besides training, such as a change of device. */
  readonly onMessage?: (message: string) => void;
  readonly signal?: AbortSignal;
}

export type Outputs = Readonly<Record<string, HostTensor>>;

/** Loss, metrics by their names, and the model's own outputs if they were asked for at build time. */
export type StepResult = {
  readonly loss: number;
  readonly step: number;
  /** Whether parameters changed: not on every batch when gradients are accumulated, and not where the loss is not finite. */
  readonly updated: boolean;
  readonly outputs: Outputs;
} & { readonly [metric: string]: number };

export type Metrics = { readonly loss: number } & { readonly [metric: string]: number };

export interface FitOptions extends BatchOptions {
  readonly epochs?: number;
  readonly schedule?: Schedule;
  readonly validation?: Dataset;
  /**
   * How many batches go to the runtime in one call, if the artifacts have a model for that: so it
   * is unless this is 1. Parameters are then up to so many steps ahead of what the loop has seen.
   */
  readonly stepsPerCall?: number;
  readonly signal?: AbortSignal;
}

/** One step of `fit`; the last step of an epoch has `validation`, where there is such data. */
export type Progress = StepResult & {
  readonly epoch: number;
  readonly learningRate: number;
  readonly totalSteps: number | undefined;
  readonly validation?: Metrics;
};
