import { ArtifactError } from "./errors.js";
import { parseManifest, type Manifest } from "./manifest.js";
import { inNode } from "./runtime.js";
import { Sha256, sha256 } from "./sha256.js";
import { keptFile, notTheFile, type FileData, type LoadProgress } from "./weights-file.js";

/**
 * Where artifacts are: the address or path of their folder, files by name, or files that a person
 * chose or dropped.
 */
export type ArtifactSource = string | URL | ReadonlyMap<string, Uint8Array> | Readonly<Record<string, Uint8Array>> | Iterable<File>;

export interface LoadOptions {
  /** In front of every file name, as `save(directory, prefix)` wrote it. */
  readonly prefix?: string;
  readonly signal?: AbortSignal;
  /** Told how far the file of weights has come. */
  readonly onProgress?: (progress: LoadProgress) => void;
  /** Whether a page keeps the file of weights among the origin's private files: so it is unless this is `false`. */
  readonly cache?: boolean;
}

/** What gives files by name. */
interface Source {
  read(file: string): Promise<FileData>;
  /** Of a server: the file before its bytes have come. */
  open?(file: string): Promise<Response>;
}

/** Artifacts whose files are read, and checked against the manifest, when they are first needed. */
export class Artifacts {
  readonly #source: Source;
  readonly #options: LoadOptions;
  readonly #checked = new Map<string, Promise<Uint8Array>>();

  private constructor(
    readonly manifest: Manifest,
    /** The manifest as it was written. */
    readonly text: string,
    source: Source,
    readonly checked = true,
    options: LoadOptions = {},
  ) {
    this.#source = source;
    this.#options = options;
  }

  /** Artifacts of which only some files are at hand, and no hashes, as in checkpoints. */
  static ofParts(text: string, files: ReadonlyMap<string, Uint8Array>, label: string): Artifacts {
    return new Artifacts(parseManifest(text, label), text, fromMap(files), false);
  }

  /** Opens artifacts: reads and validates the manifest. */
  static async load(source: ArtifactSource | Artifacts, options: LoadOptions = {}): Promise<Artifacts> {
    if (source instanceof Artifacts) return source;
    const files = reader(source, options.signal);
    const name = `${options.prefix ?? ""}manifest.json`;
    const text = new TextDecoder().decode(await inMemory(await files.read(name)));
    return new Artifacts(parseManifest(text, name), text, files, true, options);
  }

  /** Gives the bytes of one file of a folder, unchecked. */
  static async raw(folder: string, file: string): Promise<Uint8Array> {
    return await inMemory(await fromFolder(folder).read(file));
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
    // The checkpoint has a digest of its own, so that training may replace it.
    const data = await inMemory(await this.#source.read(name));
    if (!this.checked || name === this.manifest.checkpoint) return data;
    if ((await sha256(data)) !== this.#digest(name)) throw notTheFile(name);
    return data;
  }

  #digest(name: string): string {
    const { models, files } = this.manifest;
    const expected = models.find((m) => m.file === name)?.sha256 || (Object.hasOwn(files, name) ? files[name] : undefined);
    if (!expected) throw new ArtifactError(`${name}: the manifest has no sha256 of it`);
    return expected;
  }

  /** Gives a file as `file` does; that of the weights need not be in memory. */
  async data(name: string): Promise<FileData> {
    if (name !== this.manifest.weights) return await this.file(name);
    if (!this.checked) return await this.#source.read(name);
    const { open } = this.#source;
    const tell = this.#options.onProgress ?? (() => undefined);
    if (open) return await keptFile(name, this.#digest(name), () => open(name), tell, this.#options.cache !== false);
    const data = await this.#source.read(name);
    const hash = new Sha256();
    if (data instanceof Uint8Array) {
      if ((await sha256(data)) !== this.#digest(name)) throw notTheFile(name);
    } else {
      const chunks = data.stream().getReader();
      for (let next = await chunks.read(); !next.done; next = await chunks.read()) hash.add(next.value);
      if (hash.digest() !== this.#digest(name)) throw notTheFile(name);
    }
    const size = data instanceof Uint8Array ? data.length : data.size;
    tell({ file: name, loaded: size, total: size, cached: false });
    return data;
  }

  /** Reads and checks every file, and gives them by name. */
  async all(): Promise<Map<string, Uint8Array>> {
    const { models, files } = this.manifest;
    const names = [...new Set([...models.map((m) => m.file), ...Object.keys(files)])];
    return new Map(await Promise.all(names.map(async (n) => [n, await this.file(n)] as const)));
  }
}

const inMemory = async (data: FileData): Promise<Uint8Array> =>
  data instanceof Uint8Array ? data : new Uint8Array(await data.arrayBuffer());

function reader(source: ArtifactSource, signal?: AbortSignal): Source {
  if (typeof source === "string" || source instanceof URL) return fromFolder(source, signal);
  if (source instanceof Map) return fromMap(source);
  if (Symbol.iterator in Object(source)) {
    const files = new Map<string, File>();
    for (const f of source as Iterable<File>) files.set(f.name, f);
    return {
      async read(name) {
        const file = files.get(name);
        if (!file) throw missing(name, `there are ${[...files.keys()].join(", ") || "no files"}`);
        return file;
      },
    };
  }
  return fromMap(new Map(Object.entries(source as Record<string, Uint8Array>)));
}

function fromMap(files: ReadonlyMap<string, Uint8Array>): Source {
  return {
    async read(name) {
      const data = files.get(name);
      if (!data) throw missing(name, `there are ${[...files.keys()].join(", ") || "no files"}`);
      return data;
    },
  };
}

function fromFolder(source: string | URL, signal?: AbortSignal): Source {
  const text = String(source);
  const isUrl = source instanceof URL || /^[a-z][a-z0-9+.-]+:/i.test(text);
  if (inNode() && (!isUrl || text.startsWith("file:"))) return fromDisk(text);
  const base = new URL(text.endsWith("/") ? text : `${text}/`, globalThis.location?.href);
  const open = async (name: string): Promise<Response> => {
    const url = new URL(encodeURIComponent(name), base);
    let response: Response;
    try {
      response = await fetch(url, { signal: signal ?? null });
    } catch (error) {
      signal?.throwIfAborted();
      throw missing(name, `${url.href}: ${(error as Error).message}`);
    }
    if (!response.ok) throw missing(name, `${url.href}: HTTP ${response.status}`);
    return response;
  };
  return { open, read: async (name) => new Uint8Array(await (await open(name)).arrayBuffer()) };
}

function fromDisk(folder: string): Source {
  const read = async (name: string): Promise<Uint8Array> => {
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
  return { read };
}

/** Gives the name of a module of Node that bundlers for the web leave alone. */
export const nodeModule = (name: string): string => `node:${name}`;

const missing = (name: string, why: string): ArtifactError =>
  new ArtifactError(`${name}: cannot be read: ${why}\nhint: is this a directory of artifacts?`);
