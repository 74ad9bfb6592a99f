/** Reads tables from files that a person chose. */
import type { Cells, Column, Table } from "./columns.js";
import { readNpz } from "./npz.js";

export const TABLES = /\.(csv|tsv|txt|npz|jsonl|ndjson)$/i;

/** Reads a table: CSV, JSONL or NPZ, by the file's name. */
export async function readTable(file: File): Promise<Table> {
  const { name } = file;
  if (/\.npz$/i.test(name)) return { kind: "arrays", name, arrays: await readNpz(await file.arrayBuffer(), name) };
  if (/\.(jsonl|ndjson)$/i.test(name)) return readJsonl(await file.text(), name);
  if (/\.(csv|tsv|txt)$/i.test(name)) return { kind: "columns", name, columns: readCsv(await file.text(), name) };
  throw new Error(`${name}: neither .csv, .jsonl nor .npz`);
}

/** Gives the cells of a line; cells in quotes may have the mark, and two quotes for one. */
function cellsOf(line: string, mark: string): string[] {
  if (!line.includes('"')) return line.split(mark).map((cell) => cell.trim());
  const cells: string[] = [];
  let [cell, inside] = ["", false];
  for (let i = 0; i < line.length; i++) {
    const c = line[i]!;
    if (c === '"' && inside && line[i + 1] === '"') cell += line[++i];
    else if (c === '"') inside = !inside;
    else if (c === mark && !inside) {
      cells.push(cell.trim());
      cell = "";
    } else cell += c;
  }
  return [...cells, cell.trim()];
}

/** Gives the columns of a CSV by their names in the first line: numbers, or text where a column has any. */
export function readCsv(text: string, label = "table"): Map<string, Cells> {
  const lines = text.replace(/^\ufeff/, "").split(/\r?\n/).filter((line) => line.trim() !== "");
  const [head, ...rows] = lines;
  if (!head || !rows.length) throw new Error(`${label}: no rows under a line with names`);
  const mark = head.includes("\t") ? "\t" : head.includes(";") ? ";" : ",";
  const names = cellsOf(head, mark);
  const twice = names.find((name, i) => names.indexOf(name) !== i);
  if (twice !== undefined) throw new Error(`${label}: two columns are called '${twice}'`);
  if (names.every((name) => name !== "" && Number.isFinite(Number(name)))) {
    throw new Error(`${label}: the first line must name the columns, it has numbers: ${names.slice(0, 4).join(", ")}`);
  }
  const table = rows.map((row, r) => {
    const cells = cellsOf(row, mark);
    if (cells.length !== names.length) throw new Error(`${label}: line ${r + 2} has ${cells.length} cells, expected ${names.length}`);
    const empty = cells.indexOf("");
    if (empty >= 0) throw new Error(`${label}: column '${names[empty]}', line ${r + 2} is empty`);
    return cells;
  });
  return new Map(names.map((name, c) => [name, numbersOrText(table.map((row) => row[c]!))]));
}

/** Gives numbers if all are; else the text as it is. */
function numbersOrText(cells: string[]): Cells {
  const numbers = Float64Array.from(cells, Number);
  return numbers.some(Number.isNaN) ? cells : numbers;
}

const flat = (value: unknown): number[] => (Array.isArray(value) ? value.flatMap(flat) : [value as number]);
const shapeOf = (value: unknown): number[] => (Array.isArray(value) ? [value.length, ...shapeOf(value[0])] : []);

/** Gives the columns of lines of JSON: numbers, texts, or lists of numbers. */
export function readJsonl(text: string, name: string): Table {
  const rows = text.split(/\r?\n/).flatMap((line, i) => {
    if (line.trim() === "") return [];
    try {
      return [{ row: JSON.parse(line) as Record<string, unknown>, line: i + 1 }];
    } catch {
      throw new Error(`${name}: line ${i + 1} is not JSON`);
    }
  });
  if (!rows.length || typeof rows[0]!.row !== "object") throw new Error(`${name}: no lines like {"x": [1, 2], "labels": 0}`);
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
