/** The worker's program. `build.mjs` puts the text of `worker.ts`, with all that it imports, in place of this. */
export const WORKER = "";
