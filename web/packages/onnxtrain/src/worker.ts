/** The worker's side of `WorkerEngine`. */
import { LocalEngine } from "./engine.js";
import { revive } from "./errors.js";
import type { Reply, Request } from "./remote.js";

const files = new Map<string, { resolve(data: Uint8Array): void; reject(error: Error): void }>();
let engine: LocalEngine | undefined;

const reply = (message: Reply): void => globalThis.postMessage(message);

/** Asks the page for a file, which it has checked already. */
const ask = (file: string): Promise<Uint8Array> =>
  new Promise((resolve, reject) => {
    files.set(file, { resolve, reject });
    reply({ wanted: file });
  });

globalThis.onmessage = async ({ data }: MessageEvent<Request>): Promise<void> => {
  if ("file" in data) {
    const waiting = files.get(data.file);
    files.delete(data.file);
    if (data.error) waiting?.reject(revive(data.error.name, data.error.message));
    else waiting?.resolve(data.data!);
    return;
  }
  try {
    reply({ id: data.id, result: await answer(data) });
  } catch (error) {
    const { name, message } = error instanceof Error ? error : new Error(String(error));
    reply({ id: data.id, error: { name, message } });
  }
};

async function answer(request: Exclude<Request, { file: string }>): Promise<unknown> {
  if ("open" in request) {
    const { manifest, device, roles, values, options } = request.open;
    engine = await LocalEngine.create({ manifest, file: ask, forget: () => undefined }, device, roles, values, options);
    return undefined;
  }
  const work = (engine as unknown as Record<string, (...args: readonly unknown[]) => unknown>)[request.method];
  return await work!.apply(engine, [...request.args]);
}
