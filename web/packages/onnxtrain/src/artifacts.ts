import { ArtifactError } from "./errors.js";
import { type Manifest, parseManifest } from "./manifest.js";
import { nodeModule, readRegular } from "./node-files.js";
import { inNode } from "./runtime.js";
import { Sha256, sha256 } from "./sha256.js";
import { type FileData, cachedFile, type LoadProgress, digestMismatch } from "./weights-file.js";

/**
 * Where to load artifacts from: the URL or path of their directory, a map of file names to bytes, or the
 * `File`s of an `<input>` or a drop event.
 */
export type ArtifactSource = string | URL | ReadonlyMap<string, Uint8Array> | Readonly<Record<string, Uint8Array>> | Iterable<File>;

export interface LoadOptions {
  /** Prefix of every file name, as passed to `save(directory, prefix)` in Python. */
  readonly prefix?: string;
  readonly signal?: AbortSignal;
  /** Called with the download progress of the weights file. */
  readonly onProgress?: (progress: LoadProgress) => void;
  /** Whether a page caches the weights file in the origin private file system. Default: true. */
  readonly cache?: boolean;
}

/** Reads files by name. */
interface Source {
  read(file: string): Promise<FileData>;
  /** For servers: the response, before its body is downloaded. */
  open?(file: string): Promise<Response>;
}

/** A directory of artifacts. Files are read and verified against the manifest on first use. */
export class Artifacts {
  readonly #source: Source;
  readonly #options: LoadOptions;
  readonly #checked = new Map<string, Promise<Uint8Array>>();

  private constructor(
    readonly manifest: Manifest,
    /** The text of `manifest.json`. */
    readonly text: string,
    source: Source,
    readonly checked = true,
    options: LoadOptions = {},
  ) {
    this.#source = source;
    this.#options = options;
  }

  /** Creates artifacts from some of their files and the manifest of a checkpoint, which has no hashes. */
  static ofParts(text: string, files: ReadonlyMap<string, Uint8Array>, label: string): Artifacts {
    return new Artifacts(parseManifest(text, label), text, fromMap(files), false);
  }

  /** Loads artifacts: reads and validates the manifest. */
  static async load(source: ArtifactSource | Artifacts, options: LoadOptions = {}): Promise<Artifacts> {
    if (source instanceof Artifacts) return source;
    const files = reader(source, options.signal);
    const name = `${options.prefix ?? ""}manifest.json`;
    const text = new TextDecoder().decode(await inMemory(await files.read(name)));
    return new Artifacts(parseManifest(text, name), text, files, true, options);
  }

  /** Returns the bytes of one file of a directory without verifying them. */
  static async raw(folder: string, file: string): Promise<Uint8Array> {
    return await inMemory(await fromFolder(folder).read(file));
  }

  /** Returns the bytes of a file after verifying its sha256. */
  file(name: string): Promise<Uint8Array> {
    let bytes = this.#checked.get(name);
    if (!bytes) {
      bytes = this.#verified(name);
      this.#checked.set(name, bytes);
      bytes.catch(() => this.#checked.delete(name));
    }
    return bytes;
  }

  /** Drops the cached bytes of a file; the next call of `file` reads it again. */
  forget(name: string): void {
    this.#checked.delete(name);
  }

  async #verified(name: string): Promise<Uint8Array> {
    // The checkpoint stores its own digest: training replaces the file.
    const data = await inMemory(await this.#source.read(name));
    if (!this.checked || name === this.manifest.checkpoint) return data;
    if ((await sha256(data)) !== this.#digest(name)) throw digestMismatch(name);
    return data;
  }

  #digest(name: string): string {
    const { models, files } = this.manifest;
    const expected = models.find((m) => m.file === name)?.sha256 || (Object.hasOwn(files, name) ? files[name] : undefined);
    if (!expected) throw new ArtifactError(`${name}: the manifest has no sha256 for this file`);
    return expected;
  }

  /** Like `file`, but the weights file may be returned as a `Blob` that is not in memory. */
  async data(name: string): Promise<FileData> {
    if (name !== this.manifest.weights) return await this.file(name);
    if (!this.checked) return await this.#source.read(name);
    const { open } = this.#source;
    const onProgress = this.#options.onProgress ?? (() => undefined);
    if (open) return await cachedFile(name, this.#digest(name), () => open(name), onProgress, this.#options.cache !== false);
    const data = await this.#source.read(name);
    const hash = new Sha256();
    if (data instanceof Uint8Array) {
      if ((await sha256(data)) !== this.#digest(name)) throw digestMismatch(name);
    } else {
      const chunks = data.stream().getReader();
      for (let next = await chunks.read(); !next.done; next = await chunks.read()) hash.add(next.value);
      if (hash.digest() !== this.#digest(name)) throw digestMismatch(name);
    }
    const size = data instanceof Uint8Array ? data.length : data.size;
    onProgress({ file: name, loaded: size, total: size, cached: false });
    return data;
  }

  /** Reads and verifies all files; returns them by name. */
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
        if (!file) throw missing(name, `found ${[...files.keys()].join(", ") || "no files"}`);
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
      if (!data) throw missing(name, `found ${[...files.keys()].join(", ") || "no files"}`);
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
    // Development servers answer unknown paths with the page of the app.
    if (response.headers.get("Content-Type")?.startsWith("text/html")) {
      throw missing(name, `${url.href} is a web page; the server has no such file`, "; Vite serves the files in public/");
    }
    return response;
  };
  return { open, read: async (name) => new Uint8Array(await (await open(name)).arrayBuffer()) };
}

function fromDisk(folder: string): Source {
  const read = async (name: string): Promise<Uint8Array> => {
    const path = await import(/* @vite-ignore */ nodeModule("path")) as typeof import("node:path");
    const url = await import(/* @vite-ignore */ nodeModule("url")) as typeof import("node:url");
    const base = folder.startsWith("file:") ? url.fileURLToPath(folder) : folder;
    try {
      return await readRegular(path.join(base, name), base);
    } catch (error) {
      throw missing(name, (error as Error).message);
    }
  };
  return { read };
}

const missing = (name: string, why: string, more = ""): ArtifactError =>
  new ArtifactError(`${name}: cannot be read: ${why}\nhint: pass the directory that contains manifest.json as \`artifacts\`${more}`);
