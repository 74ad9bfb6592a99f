/** The worker that `WorkerEngine` starts: runs a `LocalEngine`. */
import { LocalEngine } from "./engine.js";
import { revive } from "./errors.js";
import type { FileData } from "./weights-file.js";
import type { Reply, Request } from "./worker-engine.js";

const files = new Map<string, { resolve(data: FileData): void; reject(error: Error): void }>();
let engine: LocalEngine | undefined;

const reply = (message: Reply): void => globalThis.postMessage(message);

/** Requests a file from the page, which verifies it. */
const requestFile = (file: string): Promise<FileData> =>
  new Promise((resolve, reject) => {
    files.set(file, { resolve, reject });
    reply({ requestFile: file });
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
    const bytes = requestFile as (file: string) => Promise<Uint8Array>; // only the weights file may be a Blob
    engine = await LocalEngine.create({ manifest, file: bytes, data: requestFile, forget: () => undefined }, device, roles, values, options);
    return undefined;
  }
  const work = (engine as unknown as Record<string, (...args: readonly unknown[]) => unknown>)[request.method];
  return await work!.apply(engine, [...request.args]);
}
