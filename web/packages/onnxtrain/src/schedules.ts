/** A function from step (counted from 1) to learning rate. */
export type Schedule = (step: number, totalSteps: number) => number;

/** A constant learning rate. */
export const constant = (lr: number): Schedule => () => lr;

/** Linear decay from `lr` to `end`. */
export const linear = (lr: number, end = 0): Schedule => (step, total) =>
  lr + (end - lr) * progress(step, total);

/** Cosine decay from `lr` to `end`. */
export const cosine = (lr: number, end = 0): Schedule => (step, total) =>
  end + ((lr - end) * (1 + Math.cos(Math.PI * progress(step, total)))) / 2;

/** Multiplies the learning rate by `factor` every `every` steps. */
export const stepwise = (lr: number, every: number, factor = 0.1): Schedule => (step) =>
  lr * factor ** Math.floor((step - 1) / every);

/** Linear warmup over the first `steps` steps, then another schedule. */
export const warmup = (steps: number, then: Schedule): Schedule => (step, total) =>
  step <= steps ? (then(steps + 1, total) * step) / (steps + 1) : then(step, total);

const progress = (step: number, total: number): number =>
  total > 1 ? Math.min(1, (step - 1) / (total - 1)) : 0;
