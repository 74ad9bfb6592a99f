/** The weights file: downloaded once, verified while streaming, cached by the browser and read piece by piece. */
import { ArtifactError } from "./errors.js";
import { inNode } from "./runtime.js";
import { Sha256 } from "./sha256.js";

/** Download progress of a file. */
export interface LoadProgress {
  readonly file: string;
  readonly loaded: number;
  /** Undefined if the server does not send the size. */
  readonly total: number | undefined;
  /** Whether the file came from the cache. */
  readonly cached: boolean;
}

/** The contents of a file; a `Blob` need not be in memory. */
export type FileData = Uint8Array | Blob;

const FOLDER = "onnxtrain-weights";

/** Returns the file with this sha256 from the origin private file system, or downloads it with `open` and caches it if there is space. */
export async function cachedFile(
  name: string, digest: string, open: () => Promise<Response>, onProgress: (progress: LoadProgress) => void, useCache = true,
): Promise<Blob> {
  const folder = useCache ? await privateFolder() : undefined;
  const before = await folder?.getFileHandle(digest).then((h) => h.getFile(), () => undefined);
  // The browser commits a file when its stream is closed; an empty file comes from an interrupted write.
  if (before?.size) {
    onProgress({ file: name, loaded: before.size, total: before.size, cached: true });
    return before;
  }
  const response = await open();
  const handle = await folder?.getFileHandle(digest, { create: true }).catch(() => undefined);
  const target = await handle?.createWritable().catch(() => undefined);
  if (!handle || !target) {
    const parts: Uint8Array[] = [];
    await download(name, digest, response, async (chunk) => void parts.push(chunk), onProgress);
    return new Blob(parts as Uint8Array<ArrayBuffer>[]);
  }
  // The cache may fail at any time (quota, profile being cleared): then download again without it.
  let cacheFailed = false;
  const caching = <T>(done: Promise<T>) => done.catch((error: unknown) => {
    cacheFailed = true;
    throw error;
  });
  try {
    await download(name, digest, response, (chunk) => caching(target.write(chunk as Uint8Array<ArrayBuffer>)), onProgress);
    await caching(target.close());
    return await caching(handle.getFile());
  } catch (error) {
    await target.abort().catch(() => undefined);
    // Another tab may have cached the file meanwhile; remove only an empty file.
    const other = await handle.getFile().catch(() => undefined);
    if (!other?.size) await folder?.removeEntry(digest).catch(() => undefined);
    else if (cacheFailed) return other;
    if (cacheFailed) return await cachedFile(name, digest, open, onProgress, false);
    throw error;
  }
}

/** Writes the chunks of a response; throws at the end if their sha256 differs. */
async function download(
  name: string, digest: string, response: Response, write: (chunk: Uint8Array) => Promise<void>,
  onProgress: (progress: LoadProgress) => void,
): Promise<void> {
  const length = response.headers.get("Content-Length");
  // With Content-Encoding, Content-Length is the compressed size.
  const total = length && !response.headers.get("Content-Encoding") ? Number(length) : undefined;
  const hash = new Sha256();
  let loaded = 0;
  const reader = response.body!.getReader();
  for (let next = await reader.read(); !next.done; next = await reader.read()) {
    hash.add(next.value);
    await write(next.value);
    loaded += next.value.length;
    onProgress({ file: name, loaded, total, cached: false });
  }
  if (hash.digest() !== digest) throw digestMismatch(name);
}

/** Returns the error for a file whose sha256 differs from the manifest. */
export const digestMismatch = (name: string): ArtifactError =>
  new ArtifactError(
    `${name}: sha256 does not match the manifest\n` +
      "hint: the file is damaged or comes from another build; copy or build the artifacts again",
  );

/** Deletes all cached weights files; returns how many there were. */
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
    return undefined; // not available in some private windows
  }
}

/**
 * Returns bytes that ONNX Runtime can load. In workers, a `Blob` is read tensor by tensor on access, so that the
 * weights are in memory once; elsewhere synchronous reads are not available and the whole file is read.
 */
export async function externalBytes(data: FileData): Promise<Uint8Array> {
  if (data instanceof Uint8Array) return data;
  const Reader = (globalThis as { FileReaderSync?: new () => { readAsArrayBuffer(blob: Blob): ArrayBuffer } }).FileReaderSync;
  return Reader ? new PiecewiseBytes(data, new Reader()) : new Uint8Array(await data.arrayBuffer());
}

/** A `Uint8Array` that reads slices of a file on access; ONNX Runtime only uses its length and `subarray`. */
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
