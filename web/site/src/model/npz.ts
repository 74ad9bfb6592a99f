/** Reads archives of numpy. */
import type { Column } from "./columns.js";

/** Gives the arrays of an archive that `numpy.savez` or `savez_compressed` wrote; those of text are lists. */
export async function readNpz(buffer: ArrayBuffer, label = "archive"): Promise<Map<string, Column | string[]>> {
  const view = new DataView(buffer);
  const arrays = new Map<string, Column | string[]>();
  // The list of files is at the end, behind a comment of unknown length.
  let end = buffer.byteLength - 22;
  while (end >= 0 && view.getUint32(end, true) !== 0x06054b50) end--;
  if (end < 0) throw new Error(`${label}: not an archive of numpy, or cut off`);
  const count = view.getUint16(end + 10, true);
  let at = view.getUint32(end + 16, true);
  for (let i = 0; i < count; i++) {
    const [method, packed, nameLength, extra, note] = [
      view.getUint16(at + 10, true), view.getUint32(at + 20, true), view.getUint16(at + 28, true), view.getUint16(at + 30, true), view.getUint16(at + 32, true),
    ];
    const local = view.getUint32(at + 42, true);
    const file = new TextDecoder().decode(new Uint8Array(buffer, at + 46, nameLength));
    const start = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
    if (packed === 0xffffffff || start + packed > buffer.byteLength) throw new Error(`${label}: '${file}' is cut off or too large`);
    const raw = new Uint8Array(buffer, start, packed);
    const name = file.replace(/\.npy$/, "");
    arrays.set(name, readNpy(method === 0 ? raw.slice() : await inflate(raw), `${label}: '${name}'`));
    at += 46 + nameLength + extra + note;
  }
  return arrays;
}

const inflate = async (data: Uint8Array<ArrayBuffer>): Promise<Uint8Array<ArrayBuffer>> => {
  const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
};

const ARRAYS: Record<string, [dtype: string, make: new (buffer: ArrayBuffer) => Column["data"]]> = {
  f4: ["float32", Float32Array], f8: ["float64", Float64Array], f2: ["float16", Uint16Array],
  i1: ["int8", Int8Array], i2: ["int16", Int16Array], i4: ["int32", Int32Array], i8: ["int64", BigInt64Array],
  u1: ["uint8", Uint8Array], u2: ["uint16", Uint16Array], u4: ["uint32", Uint32Array], u8: ["uint64", BigUint64Array], b1: ["bool", Uint8Array],
};

function readNpy(data: Uint8Array<ArrayBuffer>, label: string): Column | string[] {
  const view = new DataView(data.buffer);
  if (data.length < 12 || data[0] !== 0x93 || data[1] !== 0x4e) throw new Error(`${label}: not an array of numpy`);
  const wide = data[6]! > 1;
  const start = wide ? 12 : 10;
  const size = wide ? view.getUint32(8, true) : view.getUint16(8, true);
  const head = new TextDecoder("latin1").decode(data.subarray(start, start + size));
  const type = /'descr':\s*'([<>|=])(\w+)'/.exec(head);
  const dims = (/'shape':\s*\(([^)]*)\)/.exec(head)?.[1] ?? "").split(",").filter((n) => n.trim() !== "").map(Number);
  const content = data.buffer.slice(start + size);
  if (type?.[1] === "<" && /^U\d+$/.test(type[2]!) && dims.length === 1) return words(content, Number(type[2]!.slice(1)), dims[0]!);
  const kind = type && ARRAYS[type[2]!];
  if (!kind || type[1] === ">") throw new Error(`${label}: element type ${type ? type[1]! + type[2] : "?"} is not supported`);
  if (/'fortran_order':\s*True/.test(head)) throw new Error(`${label}: in Fortran's order; save it with numpy.ascontiguousarray`);
  const values = new kind[1](content);
  if (values.length !== dims.reduce((a, b) => a * b, 1)) throw new Error(`${label}: ${values.length} elements for shape (${dims.join(", ")})`);
  return { data: values, dims, dtype: kind[0] };
}

/** Gives texts of so many characters each, filled up with zeros. */
function words(content: ArrayBuffer, length: number, count: number): string[] {
  const points = new Uint32Array(content);
  return Array.from({ length: count }, (_, i) =>
    String.fromCodePoint(...points.subarray(i * length, (i + 1) * length)).replace(/\0+$/, ""));
}
