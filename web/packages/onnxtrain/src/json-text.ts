/**
 * JSON text identical to that of Python's `json`: numbers stay in text form, so that reading and writing a file
 * preserves its bytes.
 */

/** Removes whitespace between tokens. */
export function compact(text: string): string {
  return text.replace(/"(?:[^"\\]|\\.)*"|\s+/g, (token) => (token[0] === '"' ? token : ""));
}

/** Splits the compact text of an object into the text of its values, by key. */
export function entries(text: string): Map<string, string> {
  const values = new Map<string, string>();
  let depth = 0;
  let start = 1;
  let key: string | undefined;
  const token = /"(?:[^"\\]|\\.)*"|[{}[\],:]/g;
  for (let m = token.exec(text); m; m = token.exec(text)) {
    const c = m[0];
    if (c === "{" || c === "[") depth++;
    else if (c === "}" || c === "]") depth--;
    if (depth === 1 && c === ":" && key === undefined) {
      key = JSON.parse(text.slice(start, m.index)) as string;
      start = m.index + 1;
    } else if ((depth === 1 && c === ",") || (depth === 0 && c === "}")) {
      if (key !== undefined) values.set(key, text.slice(start, m.index));
      key = undefined;
      start = m.index + 1;
    }
  }
  return values;
}

/** Joins entries to the text of an object, with sorted keys. */
export function join(parts: ReadonlyMap<string, string>): string {
  const keys = [...parts.keys()].sort(byCodePoint);
  return `{${keys.map((k) => `${quote(k)}:${parts.get(k)}`).join(",")}}`;
}

/** Serializes a string in ASCII. */
export const quote = (text: string): string =>
  JSON.stringify(text).replace(
    /[\u007f-\uffff]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );

/** Serializes a value with sorted keys; numbers without a fraction are written as integers. */
export function write(value: unknown): string {
  if (typeof value === "string") return quote(value);
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : float(value);
  if (Array.isArray(value)) return `[${value.map(write).join(",")}]`;
  if (value && typeof value === "object") {
    return join(new Map(Object.entries(value).map(([k, v]) => [k, write(v)])));
  }
  return JSON.stringify(value ?? null);
}

/** Formats a float as Python does: `1.0`, `1e-05`. */
export function float(value: number): string {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "Infinity" : "-Infinity";
  const [digits, power] = value.toExponential().split("e") as [string, string];
  const exponent = Number(power);
  if (value !== 0 && (exponent < -4 || exponent >= 16)) {
    const sign = exponent < 0 ? "-" : "+";
    return `${digits}e${sign}${String(Math.abs(exponent)).padStart(2, "0")}`;
  }
  if (Object.is(value, -0)) return "-0.0";
  if (exponent < 0) {
    const bare = digits.replace(/[-.]/g, "");
    return `${value < 0 ? "-" : ""}0.${"0".repeat(-exponent - 1)}${bare}`;
  }
  const plain = String(value);
  return plain.includes(".") ? plain : `${plain}.0`;
}

/** Compares strings by code point, as Python does. */
export function byCodePoint(a: string, b: string): number {
  const [x, y] = [[...a], [...b]];
  for (let i = 0; i < Math.min(x.length, y.length); i++) {
    const d = x[i]!.codePointAt(0)! - y[i]!.codePointAt(0)!;
    if (d) return d;
  }
  return x.length - y.length;
}
