/** Gives the learning rate of a step; steps count from 1. */
export type Schedule = (step: number, totalSteps: number) => number;

/** Always the same rate. */
export const constant = (lr: number): Schedule => () => lr;

/** Falls in a straight line from `lr` to `end`. */
export const linear = (lr: number, end = 0): Schedule => (step, total) =>
  lr + (end - lr) * progress(step, total);

/** Falls along half a cosine from `lr` to `end`. */
export const cosine = (lr: number, end = 0): Schedule => (step, total) =>
  end + ((lr - end) * (1 + Math.cos(Math.PI * progress(step, total)))) / 2;

/** Is multiplied by `factor` every `every` steps. */
export const stepwise = (lr: number, every: number, factor = 0.1): Schedule => (step) =>
  lr * factor ** Math.floor((step - 1) / every);

/** Rises from almost nothing over the first `steps` steps, then follows another schedule. */
export const warmup = (steps: number, then: Schedule): Schedule => (step, total) =>
  step <= steps ? (then(steps + 1, total) * step) / (steps + 1) : then(step, total);

const progress = (step: number, total: number): number =>
  total > 1 ? Math.min(1, (step - 1) / (total - 1)) : 0;
