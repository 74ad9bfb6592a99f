/** Source of the worker. `build.mjs` replaces it by the bundled text of `worker.ts`. */
export const WORKER = "";
