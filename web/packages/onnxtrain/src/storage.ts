import { CheckpointError } from "./errors.js";
import { nodeModule, readRegular } from "./node-files.js";
import { inNode } from "./runtime.js";

/** Storage for `save` and `load`. Writes are atomic. */
export interface CheckpointStore {
  write(name: string, data: Uint8Array): Promise<void>;
  read(name: string): Promise<Uint8Array>;
}

const FOLDER = "onnxtrain";

/** Returns the file system in Node; in pages the origin private file system, or IndexedDB where that is not available, as in some private windows. */
export function defaultStore(): CheckpointStore {
  if (inNode()) return fileStore();
  const files = globalThis.navigator?.storage;
  const writable = typeof FileSystemFileHandle === "function" && "createWritable" in FileSystemFileHandle.prototype;
  if (typeof files?.getDirectory !== "function" || !writable) return databaseStore();
  let chosen: Promise<CheckpointStore> | undefined;
  const store = () => (chosen ??= files.getDirectory().then(privateFileStore, databaseStore));
  return {
    write: async (name, data) => (await store()).write(name, data),
    read: async (name) => (await store()).read(name),
  };
}

const readError = (name: string, why: string): CheckpointError =>
  new CheckpointError(`'${name}': cannot be read: ${why}`);

const writeError = (name: string, error: unknown): CheckpointError =>
  new CheckpointError(`'${name}': cannot be written: ${(error as Error).message}\nhint: check the free space; earlier checkpoints are intact`);

/** Stores checkpoints as files; names are paths. */
export function fileStore(): CheckpointStore {
  const fs = () => import(/* @vite-ignore */ nodeModule("fs/promises")) as Promise<typeof import("node:fs/promises")>;
  return {
    async write(name, data) {
      const { open, rename, rm } = await fs();
      const part = `${name}.${process.pid}.part`;
      try {
        const file = await open(part, "w");
        try {
          await file.writeFile(data);
          await file.sync();
        } finally {
          await file.close();
        }
        await rename(part, name);
      } catch (error) {
        await rm(part, { force: true });
        throw writeError(name, error);
      }
    },
    async read(name) {
      try {
        return await readRegular(name);
      } catch (error) {
        throw readError(name, (error as Error).message);
      }
    },
  };
}

/** Stores checkpoints in the origin private file system. */
export function privateFileStore(): CheckpointStore {
  const folder = async () =>
    (await navigator.storage.getDirectory()).getDirectoryHandle(FOLDER, { create: true });
  const file = (name: string) => `${encodeURIComponent(name)}.safetensors`;
  return {
    async write(name, data) {
      let stream: FileSystemWritableFileStream | undefined;
      try {
        const handle = await (await folder()).getFileHandle(file(name), { create: true });
        // The browser writes to a temporary file and replaces the target when the stream is closed.
        stream = await handle.createWritable();
        await stream.write(data as Uint8Array<ArrayBuffer>);
        await stream.close();
      } catch (error) {
        await stream?.abort().catch(() => undefined);
        throw writeError(name, error);
      }
    },
    async read(name) {
      try {
        const handle = await (await folder()).getFileHandle(file(name));
        const data = new Uint8Array(await (await handle.getFile()).arrayBuffer());
        // An interrupted first write leaves an empty file.
        if (data.length === 0) throw new Error("not found");
        return data;
      } catch (error) {
        throw readError(name, (error as Error).message);
      }
    },
  };
}

/** Stores checkpoints in IndexedDB, one transaction per write. */
export function databaseStore(): CheckpointStore {
  const done = <T>(request: IDBRequest<T>) =>
    new Promise<T>((resolve, reject) => {
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error ?? new Error("IndexedDB failed"));
    });
  const open = async () => {
    const request = indexedDB.open(FOLDER, 1);
    request.onupgradeneeded = () => request.result.createObjectStore("checkpoints");
    return await done(request);
  };
  return {
    async write(name, data) {
      let db: IDBDatabase | undefined;
      try {
        db = await open();
        const transaction = db.transaction("checkpoints", "readwrite");
        transaction.objectStore("checkpoints").put(data, name);
        await new Promise<void>((resolve, reject) => {
          transaction.oncomplete = () => resolve();
          transaction.onabort = () => reject(transaction.error ?? new Error("aborted"));
        });
      } catch (error) {
        throw writeError(name, error);
      } finally {
        db?.close();
      }
    },
    async read(name) {
      let db: IDBDatabase | undefined;
      try {
        db = await open();
        const store = db.transaction("checkpoints").objectStore("checkpoints");
        const data = (await done(store.get(name))) as Uint8Array | undefined;
        if (!data) throw new Error("not found");
        return data;
      } catch (error) {
        throw readError(name, (error as Error).message);
      } finally {
        db?.close();
      }
    },
  };
}
