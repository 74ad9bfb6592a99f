import { ArtifactError } from "./errors.js";
import { parseManifest, type Manifest } from "./manifest.js";
import { sha256 } from "./sha256.js";

/**
 * Where artifacts are: the address or path of their folder, files by name, or files that a person
 * chose or dropped.
 */
export type ArtifactSource = string | URL | ReadonlyMap<string, Uint8Array> | Readonly<Record<string, Uint8Array>> | Iterable<File>;

export interface LoadOptions {
  /** In front of every file name, as `save(directory, prefix)` wrote it. */
  readonly prefix?: string;
  readonly signal?: AbortSignal;
}

/** Artifacts whose files are read, and checked against the manifest, when they are first needed. */
export class Artifacts {
  readonly #read: (file: string) => Promise<Uint8Array>;
  readonly #checked = new Map<string, Promise<Uint8Array>>();

  private constructor(
    readonly manifest: Manifest,
    /** The manifest as it was written. */
    readonly text: string,
    read: (file: string) => Promise<Uint8Array>,
    readonly checked = true,
  ) {
    this.#read = read;
  }

  /** Artifacts of which only some files are at hand, and no hashes, as in checkpoints. */
  static ofParts(text: string, files: ReadonlyMap<string, Uint8Array>, label: string): Artifacts {
    return new Artifacts(parseManifest(text, label), text, fromMap(files), false);
  }

  /** Opens artifacts: reads and validates the manifest. */
  static async load(source: ArtifactSource | Artifacts, options: LoadOptions = {}): Promise<Artifacts> {
    if (source instanceof Artifacts) return source;
    const read = reader(source, options.signal);
    const name = `${options.prefix ?? ""}manifest.json`;
    const text = new TextDecoder().decode(await read(name));
    return new Artifacts(parseManifest(text, name), text, read);
  }

  /** Gives the bytes of one file of a folder, unchecked. */
  static async raw(folder: string, file: string): Promise<Uint8Array> {
    return await fromFolder(folder)(file);
  }

  /** Gives the bytes of a file, once its sha256 is found right. */
  file(name: string): Promise<Uint8Array> {
    let found = this.#checked.get(name);
    if (!found) {
      found = this.#verified(name);
      this.#checked.set(name, found);
      found.catch(() => this.#checked.delete(name));
    }
    return found;
  }

  /** Lets go of a file's bytes; they are read again when they are needed again. */
  forget(name: string): void {
    this.#checked.delete(name);
  }

  async #verified(name: string): Promise<Uint8Array> {
    if (!this.checked) return await this.#read(name);
    const { models, files } = this.manifest;
    const expected = models.find((m) => m.file === name)?.sha256 || (Object.hasOwn(files, name) ? files[name] : undefined);
    // The checkpoint has a digest of its own, so that training may replace it.
    if (!expected && name === this.manifest.checkpoint) return await this.#read(name);
    if (!expected) throw new ArtifactError(`${name}: the manifest has no sha256 of it`);
    const data = await this.#read(name);
    if ((await sha256(data)) !== expected) {
      throw new ArtifactError(
        `${name}: not the file that the manifest names (sha256 differs)\n` +
          "hint: it was damaged or changed; build the artifacts again",
      );
    }
    return data;
  }

  /** Reads and checks every file, and gives them by name. */
  async all(): Promise<Map<string, Uint8Array>> {
    const { models, files } = this.manifest;
    const names = [...new Set([...models.map((m) => m.file), ...Object.keys(files)])];
    return new Map(await Promise.all(names.map(async (n) => [n, await this.file(n)] as const)));
  }
}

function reader(source: ArtifactSource, signal?: AbortSignal): (file: string) => Promise<Uint8Array> {
  if (typeof source === "string" || source instanceof URL) return fromFolder(source, signal);
  if (source instanceof Map) return fromMap(source);
  if (Symbol.iterator in Object(source)) {
    const files = new Map<string, File>();
    for (const f of source as Iterable<File>) files.set(f.name, f);
    return async (name) => {
      const file = files.get(name);
      if (!file) throw missing(name, `there are ${[...files.keys()].join(", ") || "no files"}`);
      return new Uint8Array(await file.arrayBuffer());
    };
  }
  return fromMap(new Map(Object.entries(source as Record<string, Uint8Array>)));
}

function fromMap(files: ReadonlyMap<string, Uint8Array>): (file: string) => Promise<Uint8Array> {
  return async (name) => {
    const data = files.get(name);
    if (!data) throw missing(name, `there are ${[...files.keys()].join(", ") || "no files"}`);
    return data;
  };
}

function fromFolder(source: string | URL, signal?: AbortSignal): (file: string) => Promise<Uint8Array> {
  const text = String(source);
  const isUrl = source instanceof URL || /^[a-z][a-z0-9+.-]+:/i.test(text);
  const inNode = typeof process === "object" && !!process.versions?.node;
  if (inNode && (!isUrl || text.startsWith("file:"))) return fromDisk(text);
  const base = new URL(text.endsWith("/") ? text : `${text}/`, globalThis.location?.href);
  return async (name) => {
    const url = new URL(encodeURIComponent(name), base);
    let response: Response;
    try {
      response = await fetch(url, { signal: signal ?? null });
    } catch (error) {
      signal?.throwIfAborted();
      throw missing(name, `${url.href}: ${(error as Error).message}`);
    }
    if (!response.ok) throw missing(name, `${url.href}: HTTP ${response.status}`);
    return new Uint8Array(await response.arrayBuffer());
  };
}

function fromDisk(folder: string): (file: string) => Promise<Uint8Array> {
  return async (name) => {
    const fs = await import(/* @vite-ignore */ nodeModule("fs/promises")) as typeof import("node:fs/promises");
    const path = await import(/* @vite-ignore */ nodeModule("path")) as typeof import("node:path");
    const url = await import(/* @vite-ignore */ nodeModule("url")) as typeof import("node:url");
    const base = folder.startsWith("file:") ? url.fileURLToPath(folder) : folder;
    try {
      return new Uint8Array(await fs.readFile(path.join(base, name)));
    } catch (error) {
      throw missing(name, `${(error as Error).message}`);
    }
  };
}

/** Gives the name of a module of Node that bundlers for the web leave alone. */
export const nodeModule = (name: string): string => `node:${name}`;

const missing = (name: string, why: string): ArtifactError =>
  new ArtifactError(`${name}: cannot be read: ${why}\nhint: is this a directory of artifacts?`);
