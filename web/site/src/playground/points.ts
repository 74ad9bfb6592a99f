/** Points in the plane, with coordinates from -1 to 1, and their classes. */
export interface Points {
  readonly x: Float32Array;
  readonly labels: Uint8Array;
}

/** Returns a generator of uniform random numbers in [0, 1) with a seed (Mulberry32). */
export function random(seed: number): () => number {
  let s = (seed * 2654435761) >>> 0;
  return () => {
    s = (s + 0x6d2b79f5) >>> 0;
    let t = Math.imul(s ^ (s >>> 15), s | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Returns a standard normal random number. */
export const normal = (next: () => number): number => Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());

type Sampler = (k: number, classes: number, next: () => number) => [number, number];

const spiral: Sampler = (k, classes, next) => {
  const r = 0.08 + 0.86 * Math.sqrt(next());
  const angle = (classes === 2 ? 7 : 5) * r + (2 * Math.PI * k) / classes;
  return [r * Math.sin(angle), r * Math.cos(angle)];
};

/** The datasets: number of classes, and a sampler for points of a class. */
export const SETS: Record<string, { readonly name: string; readonly classes: number; readonly place: Sampler }> = {
  circle: {
    name: "Circle", classes: 2,
    place: (k, _, next) => {
      const [r, a] = [k ? 0.62 + 0.3 * next() : 0.4 * Math.sqrt(next()), 2 * Math.PI * next()];
      return [r * Math.cos(a), r * Math.sin(a)];
    },
  },
  corners: {
    name: "Corners", classes: 2,
    place: (k, _, next) => {
      const [u, v] = [0.1 + 0.82 * next(), 0.1 + 0.82 * next()];
      const side = next() < 0.5 ? 1 : -1;
      return [side * u, side * (k ? -v : v)];
    },
  },
  moons: {
    name: "Moons", classes: 2,
    place: (k, _, next) => {
      const a = Math.PI * next();
      return k ? [0.25 + 0.55 * Math.cos(a), 0.12 - 0.62 * Math.sin(a)] : [-0.25 + 0.55 * Math.cos(a), -0.12 + 0.62 * Math.sin(a)];
    },
  },
  clouds: {
    name: "Clouds", classes: 2,
    place: (k, _, next) => [(k ? 0.42 : -0.42) + 0.16 * normal(next), (k ? 0.38 : -0.38) + 0.16 * normal(next)],
  },
  spirals: { name: "Spirals", classes: 2, place: spiral },
  arms: { name: "Three arms", classes: 3, place: spiral },
};

/** Samples points of a dataset with balanced classes. */
export function drawPoints(set: string, count: number, noise: number, seed: number): Points {
  const { classes, place } = SETS[set]!;
  const next = random(seed);
  const x = new Float32Array(2 * count);
  const labels = Uint8Array.from({ length: count }, (_, i) => i % classes);
  labels.forEach((k, i) => {
    const [a, b] = place(k, classes, next);
    x.set([a + noise * 0.35 * normal(next), b + noise * 0.35 * normal(next)].map((v) => Math.max(-1, Math.min(1, v))), 2 * i);
  });
  return { x, labels };
}

/** Appends a point. */
export const withPoint = (points: Points, at: readonly [number, number], label: number): Points => ({
  x: Float32Array.of(...points.x, ...at),
  labels: Uint8Array.of(...points.labels, label),
});
