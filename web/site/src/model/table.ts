import type { Column, Table } from "./columns.js";

/** Reads a table of numbers from a file that a person chose: CSV or NPZ, by its name. */
export async function readTable(file: File): Promise<Table> {
  if (/\.npz$/i.test(file.name)) return { kind: "arrays", name: file.name, arrays: await readNpz(await file.arrayBuffer(), file.name) };
  if (/\.(csv|tsv|txt)$/i.test(file.name)) return { kind: "columns", name: file.name, columns: readCsv(await file.text(), file.name) };
  throw new Error(`${file.name}: neither .csv nor .npz`);
}

/** Gives the columns of a CSV by their names in the first line; every other cell must be a number. */
export function readCsv(text: string, label = "table"): Map<string, Float64Array> {
  const lines = text.replace(/^\ufeff/, "").split(/\r?\n/).filter((line) => line.trim() !== "");
  const [head, ...rows] = lines;
  if (!head || !rows.length) throw new Error(`${label}: no rows under a line with names`);
  const mark = head.includes("\t") ? "\t" : head.includes(";") ? ";" : ",";
  const names = head.split(mark).map((name) => name.trim().replace(/^"(.*)"$/, "$1"));
  const twice = names.find((name, i) => names.indexOf(name) !== i);
  if (twice !== undefined) throw new Error(`${label}: two columns are called '${twice}'`);
  if (names.every((name) => name !== "" && Number.isFinite(Number(name)))) {
    throw new Error(`${label}: the first line must name the columns, it has numbers: ${names.slice(0, 4).join(", ")}`);
  }
  const columns = new Map(names.map((name) => [name, new Float64Array(rows.length)]));
  rows.forEach((row, r) => {
    const cells = row.split(mark);
    if (cells.length !== names.length) throw new Error(`${label}: line ${r + 2} has ${cells.length} cells, expected ${names.length}`);
    cells.forEach((cell, c) => {
      const value = Number(cell.trim().replace(/^"(.*)"$/, "$1"));
      if (cell.trim() === "" || Number.isNaN(value)) {
        throw new Error(`${label}: column '${names[c]}', line ${r + 2}: '${cell.trim()}' is not a number`);
      }
      columns.get(names[c]!)![r] = value;
    });
  });
  return columns;
}

/** Gives the arrays of an archive that `numpy.savez` or `savez_compressed` wrote. */
export async function readNpz(buffer: ArrayBuffer, label = "archive"): Promise<Map<string, Column>> {
  const view = new DataView(buffer);
  const arrays = new Map<string, Column>();
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

function readNpy(data: Uint8Array<ArrayBuffer>, label: string): Column {
  const view = new DataView(data.buffer);
  if (data.length < 12 || data[0] !== 0x93 || data[1] !== 0x4e) throw new Error(`${label}: not an array of numpy`);
  const wide = data[6]! > 1;
  const start = wide ? 12 : 10;
  const size = wide ? view.getUint32(8, true) : view.getUint16(8, true);
  const head = new TextDecoder("latin1").decode(data.subarray(start, start + size));
  const type = /'descr':\s*'([<>|=])(\w+)'/.exec(head);
  const kind = type && ARRAYS[type[2]!];
  if (!kind || type[1] === ">") throw new Error(`${label}: element type ${type ? type[1]! + type[2] : "?"} is not supported`);
  if (/'fortran_order':\s*True/.test(head)) throw new Error(`${label}: in Fortran's order; save it with numpy.ascontiguousarray`);
  const dims = (/'shape':\s*\(([^)]*)\)/.exec(head)?.[1] ?? "").split(",").filter((n) => n.trim() !== "").map(Number);
  const values = new kind[1](data.buffer.slice(start + size));
  if (values.length !== dims.reduce((a, b) => a * b, 1)) throw new Error(`${label}: ${values.length} elements for shape (${dims.join(", ")})`);
  return { data: values, dims, dtype: kind[0] };
}
