/** Large files: fetched once, checked while they come, kept by the browser, read piece by piece. */
import { ArtifactError } from "./errors.js";
import { inNode } from "./runtime.js";
import { Sha256 } from "./sha256.js";

/** How far a file has come. */
export interface LoadProgress {
  readonly file: string;
  readonly loaded: number;
  /** Unknown where the server does not tell. */
  readonly total: number | undefined;
  /** Whether it was there already, from an earlier visit. */
  readonly cached: boolean;
}

/** What holds a file without its bytes being in memory. */
export type FileData = Uint8Array | Blob;

const FOLDER = "onnxtrain-weights";

/** Gives a file of this sha256 from the origin's private files, or what `open` gives, which is kept there if there is room. */
export async function keptFile(
  name: string, digest: string, open: () => Promise<Response>, tell: (progress: LoadProgress) => void, keep = true,
): Promise<Blob> {
  const folder = keep ? await privateFolder() : undefined;
  const before = await folder?.getFileHandle(digest).then((h) => h.getFile(), () => undefined);
  // The browser puts a file in its place when all of it is written; an empty one was never closed.
  if (before?.size) {
    tell({ file: name, loaded: before.size, total: before.size, cached: true });
    return before;
  }
  const response = await open();
  const handle = await folder?.getFileHandle(digest, { create: true }).catch(() => undefined);
  const target = await handle?.createWritable().catch(() => undefined);
  if (!handle || !target) {
    const parts: Uint8Array[] = [];
    await checked(name, digest, response, async (chunk) => void parts.push(chunk), tell);
    return new Blob(parts as Uint8Array<ArrayBuffer>[]);
  }
  // No room, a profile that is being cleared: what cannot be kept is fetched without it.
  let lost = false;
  const keeping = <T>(done: Promise<T>) => done.catch((error: unknown) => {
    lost = true;
    throw error;
  });
  try {
    await checked(name, digest, response, (chunk) => keeping(target.write(chunk as Uint8Array<ArrayBuffer>)), tell);
    await keeping(target.close());
    return await keeping(handle.getFile());
  } catch (error) {
    await target.abort().catch(() => undefined);
    // Another tab may have kept the file meanwhile; only a name without content is ours to remove.
    const other = await handle.getFile().catch(() => undefined);
    if (!other?.size) await folder?.removeEntry(digest).catch(() => undefined);
    else if (lost) return other;
    if (lost) return await keptFile(name, digest, open, tell, false);
    throw error;
  }
}

/** Hands on the chunks of a response; fails at the end if they are not the file that was meant. */
async function checked(
  name: string, digest: string, response: Response, write: (chunk: Uint8Array) => Promise<void>,
  tell: (progress: LoadProgress) => void,
): Promise<void> {
  const length = response.headers.get("Content-Length");
  // Of a compressed file the length is that of what travels.
  const total = length && !response.headers.get("Content-Encoding") ? Number(length) : undefined;
  const hash = new Sha256();
  let loaded = 0;
  const reader = response.body!.getReader();
  for (let next = await reader.read(); !next.done; next = await reader.read()) {
    hash.add(next.value);
    await write(next.value);
    loaded += next.value.length;
    tell({ file: name, loaded, total, cached: false });
  }
  if (hash.digest() !== digest) throw notTheFile(name);
}

/** Gives the error for a file with other content than the manifest says. */
export const notTheFile = (name: string): ArtifactError =>
  new ArtifactError(
    `${name}: not the file that the manifest names (sha256 differs)\n` +
      "hint: it was damaged or changed; build the artifacts again",
  );

/** Removes all files that were kept, so that they are fetched again; gives how many there were. */
export async function forgetWeights(): Promise<number> {
  const folder = (await privateFolder()) as (FileSystemDirectoryHandle & { keys(): AsyncIterable<string> }) | undefined;
  const names: string[] = [];
  if (folder) for await (const name of folder.keys()) names.push(name);
  await Promise.all(names.map((name) => folder!.removeEntry(name)));
  return names.length;
}

async function privateFolder(): Promise<FileSystemDirectoryHandle | undefined> {
  const writable = typeof FileSystemFileHandle === "function" && "createWritable" in FileSystemFileHandle.prototype;
  if (inNode() || !writable) return undefined;
  try {
    return await (await navigator.storage.getDirectory()).getDirectoryHandle(FOLDER, { create: true });
  } catch {
    return undefined; // a private window may refuse
  }
}

/**
 * Gives bytes that ONNX Runtime may read: of a file, it gets each tensor when it asks for it, so
 * that memory holds the weights once. Only workers can read so; elsewhere all is read at once.
 */
export async function readable(data: FileData): Promise<Uint8Array> {
  if (data instanceof Uint8Array) return data;
  const Reader = (globalThis as { FileReaderSync?: new () => { readAsArrayBuffer(blob: Blob): ArrayBuffer } }).FileReaderSync;
  return Reader ? new PiecewiseBytes(data, new Reader()) : new Uint8Array(await data.arrayBuffer());
}

/** Looks like all bytes of a file to who asks for its length and for parts of it. */
class PiecewiseBytes extends Uint8Array {
  readonly #file: Blob;
  readonly #reader: { readAsArrayBuffer(blob: Blob): ArrayBuffer };

  constructor(file: Blob, reader: { readAsArrayBuffer(blob: Blob): ArrayBuffer }) {
    super(0);
    this.#file = file;
    this.#reader = reader;
    for (const name of ["length", "byteLength"]) Object.defineProperty(this, name, { value: file.size });
  }

  override subarray(begin = 0, end = this.#file.size): Uint8Array<ArrayBuffer> {
    return new Uint8Array(this.#reader.readAsArrayBuffer(this.#file.slice(begin, end)));
  }
}
