/** Storage of checkpoints and weights in browsers, with mocked browser APIs. */
import { createHash } from "node:crypto";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { defaultStore } from "../src/storage.js";
import { cachedFile } from "../src/weights-file.js";

const CONTENT = new Uint8Array([5, 9, 2]);
const DIGEST = createHash("sha256").update(CONTENT).digest("hex");
await new Response(CONTENT).arrayBuffer(); // Node loads Response lazily and checks process.versions then
const failing = (name: string) => async () => {
  throw new DOMException("refused", name);
};

/** A directory of the origin private file system; `broken` replaces some methods by failing ones. */
function folder(broken: { getFileHandle?: () => Promise<never>; write?: () => Promise<never>; close?: () => Promise<never> } = {}) {
  const files = new Map<string, Blob>();
  const handle = (name: string) => ({
    getFile: async () => files.get(name) ?? new Blob(),
    createWritable: async () => {
      const parts: Uint8Array<ArrayBuffer>[] = [];
      return {
        write: broken.write ?? (async (data: Uint8Array<ArrayBuffer>) => void parts.push(data)),
        close: broken.close ?? (async () => void files.set(name, new Blob(parts))),
        abort: async () => undefined,
      };
    },
  });
  return {
    files,
    getDirectoryHandle: async () => ({
      getFileHandle: async (name: string, { create = false } = {}) => {
        if (create) await broken.getFileHandle?.();
        if (!create && !files.has(name)) throw new DOMException("none", "NotFoundError");
        return handle(name);
      },
      removeEntry: async (name: string) => void files.delete(name),
    }),
  };
}

function page(getDirectory: () => Promise<unknown>): void {
  vi.stubGlobal("FileSystemFileHandle", class { createWritable() {} });
  vi.stubGlobal("navigator", { storage: { getDirectory } });
}

/** The part of IndexedDB that checkpoints need. */
function database() {
  const kept = new Map<string, unknown>();
  const answered = <T>(result: T) => {
    const request = { result, onsuccess: undefined as (() => void) | undefined };
    queueMicrotask(() => request.onsuccess?.());
    return request;
  };
  const transaction = () => {
    const made = {
      oncomplete: undefined as (() => void) | undefined,
      objectStore: () => ({ put: (data: unknown, name: string) => void kept.set(name, data), get: (name: string) => answered(kept.get(name)) }),
    };
    setTimeout(() => made.oncomplete?.());
    return made;
  };
  return { kept, open: () => answered({ transaction, close: () => undefined }) };
}

beforeEach(() => void vi.spyOn(process, "versions", "get").mockReturnValue({} as NodeJS.ProcessVersions));
afterEach(() => {
  vi.restoreAllMocks();
  vi.unstubAllGlobals();
});

const fetched = (): { open: () => Promise<Response>; times: () => number } => {
  let times = 0;
  return { open: async () => (times++, new Response(CONTENT)), times: () => times };
};
const bytes = async (file: Blob) => new Uint8Array(await file.arrayBuffer());

test("falls back to IndexedDB if the origin private file system is not available", async () => {
  page(failing("SecurityError"));
  const { kept, ...indexedDB } = database();
  vi.stubGlobal("indexedDB", indexedDB);
  const store = defaultStore();
  await store.write("run", CONTENT);
  expect([...kept.keys()]).toEqual(["run"]);
  expect(await store.read("run")).toEqual(CONTENT);
});

test("a cached file is downloaded once", async () => {
  const there = folder();
  page(async () => there);
  const { open, times } = fetched();
  for (let i = 0; i < 2; i++) expect(await bytes(await cachedFile("w", DIGEST, open, () => undefined))).toEqual(CONTENT);
  expect([times(), [...there.files.keys()]]).toEqual([1, [DIGEST]]);
});

test.each([
  ["a file cannot be created", { getFileHandle: failing("QuotaExceededError") }],
  ["a file cannot be written", { write: failing("QuotaExceededError") }],
  ["the profile is being cleared", { write: failing("InvalidStateError") }],
  ["a file cannot be closed", { close: failing("UnknownError") }],
])("if %s, the weights are used without the cache", async (_, broken) => {
  const there = folder(broken);
  page(async () => there);
  const { open } = fetched();
  expect(await bytes(await cachedFile("w", DIGEST, open, () => undefined))).toEqual(CONTENT);
  expect(there.files.size).toBe(0);
});

test("uses and keeps a file that another tab cached meanwhile", async () => {
  const there = folder({
    write: async () => {
      there.files.set(DIGEST, new Blob([CONTENT]));
      throw new DOMException("full", "QuotaExceededError");
    },
  });
  page(async () => there);
  const { open, times } = fetched();
  expect(await bytes(await cachedFile("w", DIGEST, open, () => undefined))).toEqual(CONTENT);
  expect([times(), [...there.files.keys()]]).toEqual([1, [DIGEST]]);
});

test("rejects and does not cache a file with another digest", async () => {
  const there = folder();
  page(async () => there);
  await expect(cachedFile("w", "0".repeat(64), fetched().open, () => undefined)).rejects.toThrow("sha256 does not match the manifest");
  expect(there.files.size).toBe(0);
});
