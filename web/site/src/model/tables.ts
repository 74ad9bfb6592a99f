import type { Cells, Column, Table } from "./columns.js";

/** Reads tables from CSV, JSONL and NPZ files. */

export const TABLES = /\.(csv|tsv|txt|npz|jsonl|ndjson)$/i;

/** Reads a CSV, JSONL or NPZ file, by its extension. */
export async function readTable(file: File): Promise<Table> {
  const { name } = file;
  if (/\.npz$/i.test(name)) return { kind: "arrays", name, arrays: await readNpz(await file.arrayBuffer(), name) };
  if (/\.(jsonl|ndjson)$/i.test(name)) return readJsonl(await file.text(), name);
  if (/\.(csv|tsv|txt)$/i.test(name)) return { kind: "columns", name, columns: readCsv(await file.text(), name) };
  throw new Error(`${name}: unsupported file type; expected .csv, .jsonl or .npz`);
}

/** Splits a line into cells; quoted cells may contain the separator and doubled quotes. */
function cellsOf(line: string, separator: string): string[] {
  if (!line.includes('"')) return line.split(separator).map((cell) => cell.trim());
  const cells: string[] = [];
  let [cell, inside] = ["", false];
  for (let i = 0; i < line.length; i++) {
    const c = line[i]!;
    if (c === '"' && inside && line[i + 1] === '"') cell += line[++i];
    else if (c === '"') inside = !inside;
    else if (c === separator && !inside) {
      cells.push(cell.trim());
      cell = "";
    } else cell += c;
  }
  return [...cells, cell.trim()];
}

/** Parses a CSV file with a header line; columns are numbers, or strings if any cell is not a number. */
export function readCsv(text: string, label = "table"): Map<string, Cells> {
  const lines = text.replace(/^\ufeff/, "").split(/\r?\n/).filter((line) => line.trim() !== "");
  const [head, ...rows] = lines;
  if (!head || !rows.length) throw new Error(`${label}: expected a header line and rows`);
  const separator = head.includes("\t") ? "\t" : head.includes(";") ? ";" : ",";
  const names = cellsOf(head, separator);
  const duplicate = names.find((name, i) => names.indexOf(name) !== i);
  if (duplicate !== undefined) throw new Error(`${label}: duplicate column '${duplicate}'`);
  if (names.every((name) => name !== "" && Number.isFinite(Number(name)))) {
    throw new Error(`${label}: the first line must contain column names, got numbers: ${names.slice(0, 4).join(", ")}`);
  }
  const table = rows.map((row, r) => {
    const cells = cellsOf(row, separator);
    if (cells.length !== names.length) throw new Error(`${label}: line ${r + 2} has ${cells.length} cells, expected ${names.length}`);
    const empty = cells.indexOf("");
    if (empty >= 0) throw new Error(`${label}: column '${names[empty]}', line ${r + 2} is empty`);
    return cells;
  });
  return new Map(names.map((name, c) => [name, numbersOrText(table.map((row) => row[c]!))]));
}

/** Parses cells as numbers if all of them are numbers. */
function numbersOrText(cells: string[]): Cells {
  const numbers = Float64Array.from(cells, Number);
  return numbers.some(Number.isNaN) ? cells : numbers;
}

const flat = (value: unknown): number[] => (Array.isArray(value) ? value.flatMap(flat) : [value as number]);
const shapeOf = (value: unknown): number[] => (Array.isArray(value) ? [value.length, ...shapeOf(value[0])] : []);

/** Parses lines of JSON objects with numbers, strings or lists of numbers. */
export function readJsonl(text: string, name: string): Table {
  const rows = text.split(/\r?\n/).flatMap((line, i) => {
    if (line.trim() === "") return [];
    try {
      return [{ row: JSON.parse(line) as Record<string, unknown>, line: i + 1 }];
    } catch {
      throw new Error(`${name}: line ${i + 1} is not JSON`);
    }
  });
  if (!rows.length || typeof rows[0]!.row !== "object") throw new Error(`${name}: expected lines like {"x": [1, 2], "labels": 0}`);
  const keys = Object.keys(rows[0]!.row);
  const values = keys.map((key) => rows.map(({ row, line }) => {
    if (row[key] === undefined || row[key] === null) throw new Error(`${name}: line ${line} has no '${key}'`);
    return row[key];
  }));
  if (!values.some((v) => Array.isArray(v[0]))) {
    return { kind: "columns", name, columns: new Map(keys.map((key, c) => [key, numbersOrText(values[c]!.map(String))])) };
  }
  return { kind: "arrays", name, arrays: new Map(keys.map((key, c) => [key, arrayOf(values[c]!, key, name, rows.map((r) => r.line))])) };
}

function arrayOf(values: unknown[], key: string, name: string, lines: number[]): Column | string[] {
  if (values.every((v) => typeof v === "string")) return values as string[];
  const dims = shapeOf(values[0]);
  const wrong = values.findIndex((v) => shapeOf(v).join() !== dims.join() || flat(v).some((n) => typeof n !== "number"));
  if (wrong >= 0) throw new Error(`${name}: line ${lines[wrong]}: '${key}' is not ${dims.length ? `a list of ${dims.join(" x ")} numbers` : "a number"} as in line ${lines[0]}`);
  return { data: Float64Array.from(values.flatMap(flat)), dims: [values.length, ...dims], dtype: "float64" };
}

/** Reads the arrays of a file written by `numpy.savez` or `savez_compressed`; string arrays become lists. */
export async function readNpz(buffer: ArrayBuffer, label = "archive"): Promise<Map<string, Column | string[]>> {
  const view = new DataView(buffer);
  const arrays = new Map<string, Column | string[]>();
  // The central directory is at the end, before a comment of unknown length.
  let end = buffer.byteLength - 22;
  while (end >= 0 && view.getUint32(end, true) !== 0x06054b50) end--;
  if (end < 0) throw new Error(`${label}: not an NPZ file, or truncated`);
  const count = view.getUint16(end + 10, true);
  let at = view.getUint32(end + 16, true);
  for (let i = 0; i < count; i++) {
    const [method, packed, nameLength, extra, note] = [
      view.getUint16(at + 10, true), view.getUint32(at + 20, true), view.getUint16(at + 28, true), view.getUint16(at + 30, true), view.getUint16(at + 32, true),
    ];
    const local = view.getUint32(at + 42, true);
    const file = new TextDecoder().decode(new Uint8Array(buffer, at + 46, nameLength));
    const start = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
    if (packed === 0xffffffff || start + packed > buffer.byteLength) throw new Error(`${label}: '${file}' is truncated or too large`);
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
  if (data.length < 12 || data[0] !== 0x93 || data[1] !== 0x4e) throw new Error(`${label}: not an NPY array`);
  const wide = data[6]! > 1;
  const start = wide ? 12 : 10;
  const size = wide ? view.getUint32(8, true) : view.getUint16(8, true);
  const head = new TextDecoder("latin1").decode(data.subarray(start, start + size));
  const type = /'descr':\s*'([<>|=])(\w+)'/.exec(head);
  const dims = (/'shape':\s*\(([^)]*)\)/.exec(head)?.[1] ?? "").split(",").filter((n) => n.trim() !== "").map(Number);
  const content = data.buffer.slice(start + size);
  if (type?.[1] === "<" && /^U\d+$/.test(type[2]!) && dims.length === 1) return decodeStrings(content, Number(type[2]!.slice(1)), dims[0]!);
  const kind = type && ARRAYS[type[2]!];
  if (!kind || type[1] === ">") throw new Error(`${label}: dtype ${type ? type[1]! + type[2] : "?"} is not supported`);
  if (/'fortran_order':\s*True/.test(head)) throw new Error(`${label}: Fortran order is not supported; save it with numpy.ascontiguousarray`);
  const values = new kind[1](content);
  if (values.length !== dims.reduce((a, b) => a * b, 1)) throw new Error(`${label}: ${values.length} elements for shape (${dims.join(", ")})`);
  return { data: values, dims, dtype: kind[0] };
}

/** Decodes zero-padded UTF-32 strings of fixed length. */
function decodeStrings(content: ArrayBuffer, length: number, count: number): string[] {
  const points = new Uint32Array(content);
  return Array.from({ length: count }, (_, i) =>
    String.fromCodePoint(...points.subarray(i * length, (i + 1) * length)).replace(/\0+$/, ""));
}
