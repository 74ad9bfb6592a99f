/** Reads files in Node: regular files only, of a limited size, and optionally only inside a directory. */

/** Returns the specifier of a Node built-in in a form that web bundlers do not try to resolve. */
export const nodeModule = (name: string): string => `node:${name}`;

/** Node cannot read larger files into one buffer. */
const FILE_LIMIT = 2 ** 31 - 1;
const JSON_LIMIT = 2 ** 27;

/**
 * Returns the bytes of a file. Pipes and devices, which may never end, are rejected; with `within`, links that lead out
 * of that directory are, too.
 */
export async function readRegular(path: string, within?: string): Promise<Uint8Array> {
  const { constants, open, realpath } = await import(/* @vite-ignore */ nodeModule("fs/promises")) as typeof import("node:fs/promises");
  const { sep } = await import(/* @vite-ignore */ nodeModule("path")) as typeof import("node:path");
  let flags = constants.O_RDONLY | (constants.O_NONBLOCK ?? 0); // opening a pipe for reading would wait for a writer
  if (within !== undefined) {
    const [real, root] = await Promise.all([realpath(path), realpath(within)]);
    if (!real.startsWith(root.endsWith(sep) ? root : root + sep)) throw new Error(`it is a link that leads out of '${within}'`);
    [path, flags] = [real, flags | (constants.O_NOFOLLOW ?? 0)]; // a link at this place is newer than the check
  }
  const file = await open(path, flags);
  try {
    const info = await file.stat();
    if (info.isDirectory()) throw new Error("this is a directory");
    if (!info.isFile()) throw new Error("not a regular file but a pipe, a device or a socket");
    const limit = path.endsWith(".json") ? JSON_LIMIT : FILE_LIMIT;
    if (info.size > limit) throw new Error(`the file has ${info.size} bytes, the limit is ${limit}`);
    const data = new Uint8Array(info.size);
    for (let at = 0; at < data.length;) {
      const { bytesRead } = await file.read(data, at);
      if (!bytesRead) throw new Error("the file became shorter while it was read");
      at += bytesRead;
    }
    return data;
  } finally {
    await file.close();
  }
}
