/** Storage for the key, id and unfinished work of a node, so that it survives a reload. */
import { exportKey, importKey } from "./connection.js";
import { nodeModule, readRegular } from "../node-files.js";

export interface NodeStore {
  /** Returns a stored value, or `undefined`. */
  get(name: string): Promise<unknown>;
  put(name: string, value: unknown): Promise<void>;
  remove(name: string): Promise<void>;
  /** Whether keys are stored as text because the store cannot hold a `CryptoKey`. */
  readonly text?: boolean;
}

/** Stores values in memory. */
export function memoryNodeStore(): NodeStore {
  const values = new Map<string, unknown>();
  return {
    async get(name) {
      return values.get(name);
    },
    async put(name, value) {
      values.set(name, value);
    },
    async remove(name) {
      values.delete(name);
    },
  };
}

/** Stores values in IndexedDB, which can hold keys that are not extractable. */
export function databaseNodeStore(database = "onnxtrain-flower"): NodeStore {
  const settled = <T>(request: IDBRequest<T>) =>
    new Promise<T>((resolve, reject) => {
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error ?? new Error("IndexedDB failed"));
    });
  const within = async <T>(mode: IDBTransactionMode, work: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> => {
    const request = indexedDB.open(database, 1);
    request.onupgradeneeded = () => request.result.createObjectStore("node");
    const db = await settled(request);
    try {
      return await settled(work(db.transaction("node", mode).objectStore("node")));
    } finally {
      db.close();
    }
  };
  return {
    get: (name) => within("readonly", (s) => s.get(name) as IDBRequest<unknown>),
    put: async (name, value) => void (await within("readwrite", (s) => s.put(value, name))),
    remove: async (name) => void (await within("readwrite", (s) => s.delete(name) as IDBRequest<unknown>)),
  };
}

/** Stores values as files of a directory, in Node. They contain the private key: anyone who can read them can act as this node. */
export function fileNodeStore(folder: string): NodeStore {
  const modules = async () => {
    const fs = await import(/* @vite-ignore */ nodeModule("fs/promises")) as typeof import("node:fs/promises");
    const v8 = await import(/* @vite-ignore */ nodeModule("v8")) as typeof import("node:v8");
    return { fs, v8 };
  };
  const path = (name: string) => `${folder}/${encodeURIComponent(name)}`;
  return {
    text: true,
    async get(name) {
      const { v8 } = await modules();
      const data = await readRegular(path(name)).catch((error: NodeJS.ErrnoException) => {
        if (error.code === "ENOENT") return undefined;
        throw error;
      });
      return data && v8.deserialize(data);
    },
    async put(name, value) {
      const { fs, v8 } = await modules();
      await fs.mkdir(folder, { recursive: true, mode: 0o700 });
      const part = `${path(name)}.${process.pid}.part`;
      await fs.writeFile(part, v8.serialize(value), { mode: 0o600 });
      await fs.rename(part, path(name));
    },
    async remove(name) {
      await (await modules()).fs.rm(path(name), { force: true });
    },
  };
}

/** Key and id of a node. */
export interface Identity {
  readonly key: CryptoKeyPair;
  readonly id: bigint | undefined;
}

export async function readIdentity(store: NodeStore, name: string): Promise<Identity | undefined> {
  const saved = (await store.get(name)) as { key: CryptoKeyPair | string; id: bigint | undefined } | undefined;
  if (!saved) return undefined;
  return { id: saved.id, key: typeof saved.key === "string" ? await importKey(saved.key) : saved.key };
}

export async function writeIdentity(store: NodeStore, name: string, { key, id }: Identity): Promise<void> {
  await store.put(name, { id, key: store.text ? await exportKey(key) : key });
}
