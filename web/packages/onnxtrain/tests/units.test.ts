import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { decode, encode } from "../src/dtypes.js";
import { feed, fit } from "../src/feeds.js";
import { byCodePoint, compact, entries, float, join, quote, write } from "../src/json-text.js";
import { constant, cosine, linear, stepwise, warmup } from "../src/schedules.js";
import { type ModelValue, readModel } from "../src/onnx-model.js";
import { plainSha256 } from "../src/sha256.js";
import { ROOT, runPython } from "./support.js";

test("sha256 matches Node's", () => {
  for (const n of [0, 1, 55, 56, 63, 64, 65, 1000]) {
    const data = Uint8Array.from({ length: n }, (_, i) => (i * 37) & 255);
    const wanted = createHash("sha256").update(data).digest("hex");
    expect(Buffer.from(plainSha256(data)).toString("hex")).toBe(wanted);
  }
});

test("floats and strings are serialized as in Python", () => {
  const numbers = [0, 1, -1, 0.1, 1e-4, 1.5e-5, 1e-5, 123456789.125, 1e15, 1e16, 1.7e22, 5e-324, 0.00012345, -2.5e-7, 1e300];
  const wanted = JSON.parse(runPython(`import json; print(json.dumps([repr(float(x)) for x in ${JSON.stringify(numbers)}]))`)) as string[];
  expect(numbers.map(float)).toEqual(wanted);
  const strings = ["a\"b\\", "grüße", "\u007f", "\u2028", "😀", "\n\t\u0001"];
  const quoted = JSON.parse(runPython(`import json; print(json.dumps([json.dumps(s) for s in json.loads(${JSON.stringify(JSON.stringify(strings))})]))`)) as string[];
  expect(strings.map(quote)).toEqual(quoted);
});

test("readModel reads what a file declares, as onnx does", () => {
  const path = `${ROOT}/web/site/shipped/models/backbone.onnx`;
  const wanted = JSON.parse(runPython(`
import json, onnx, sys
m = onnx.load(sys.argv[1], load_external_data=False); g = m.graph
dims = lambda v: [d.dim_value or d.dim_param for d in v.type.tensor_type.shape.dim]
print(json.dumps({"inputs": [[v.name, dims(v)] for v in g.input], "outputs": [[v.name, dims(v)] for v in g.output],
  "weights": [[w.name, list(w.dims)] for w in g.initializer], "nodes": [[n.op_type, n.domain, list(n.input), list(n.output)] for n in g.node],
  "opset": m.opset_import[0].version, "producer": m.producer_name}))`, path)) as Record<string, unknown>;
  const model = readModel(readFileSync(path));
  const pairs = (values: readonly ModelValue[]) => values.map((v) => [v.name, v.shape]);
  expect({
    inputs: pairs(model.inputs), outputs: pairs(model.outputs), weights: pairs(model.weights),
    nodes: model.nodes.map((n) => [n.type, n.domain, n.inputs, n.outputs]), opset: model.opset, producer: model.producer,
  }).toEqual(wanted);
  expect(new Set(model.weights.map((w) => w.dtype))).toEqual(new Set(["float32", "int64"]));
  for (const damaged of [new Uint8Array(), readFileSync(path).subarray(0, 3000), new TextEncoder().encode("<!doctype html><p>no</p>")]) {
    expect(() => readModel(damaged)).toThrow(/^not an ONNX model|^the model is damaged/);
  }
});

test("JSON text survives splitting and joining", () => {
  const text = '{"a":{"x":"},{:","y":[1.0,{"z":2}]},"b":1e-05,"c":"q\\"","d":[]}';
  expect(join(entries(text))).toBe(text);
  expect(compact('{ "a b" : [1,\n 2] }')).toBe('{"a b":[1,2]}');
  expect(entries("{}").size).toBe(0);
  expect(write({ b: 0.5, a: [1, "x", null, true] })).toBe('{"a":[1,"x",null,true],"b":0.5}');
  expect(["😀", "\uffff", "a"].sort(byCodePoint)).toEqual(["a", "\uffff", "😀"]);
});

test("float16 and bfloat16 conversions match numpy", () => {
  for (let bits = 0; bits < 65536; bits++) {
    const value = decode("float16", bits);
    if (Number.isNaN(value)) continue;
    expect(encode("float16", value)).toBe(bits);
  }
  const values = Array.from({ length: 400 }, (_, i) => Math.sin(i) * 2 ** ((i % 44) - 28));
  const wanted = JSON.parse(
    runPython(`import json, sys, numpy as np, ml_dtypes
x = np.array(json.loads(sys.argv[1]))
print(json.dumps([x.astype(np.float16).view(np.uint16).tolist(), x.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16).tolist()]))`, JSON.stringify([...values, 65519, 65520, -70000])),
  ) as [number[], number[]];
  const all = [...values, 65519, 65520, -70000];
  expect(all.map((v) => encode("float16", v))).toEqual(wanted[0]);
  expect(all.map((v) => encode("bfloat16", v))).toEqual(wanted[1]);
});

const one = (dtype: string, value: unknown, shape: number[] = [2]) => [...(fit({ name: "t", dtype, shape }, value as never).data as Float32Array)];

test("converts dtypes without loss", () => {
  expect(one("float32", [1, 2.5])).toEqual([1, 2.5]);
  expect(one("float32", Float64Array.of(0.1, 1))).toEqual([Math.fround(0.1), 1]);
  expect(one("int64", Uint8Array.of(3, 255))).toEqual([3n, 255n]);
  expect(one("int64", [2 ** 40, -1])).toEqual([BigInt(2 ** 40), -1n]);
  expect(one("int32", BigInt64Array.of(5n, -5n))).toEqual([5, -5]);
  expect(one("bool", [true, false])).toEqual([1, 0]);
  expect(one("float16", [1, 0.5])).toEqual([0x3c00, 0x3800]);
  expect(one("float32", [[1], [2]], [2, 1])).toEqual([1, 2]);
  expect(one("float32", { data: [1, 2], dims: [2] })).toEqual([1, 2]);
  expect(one("float32", { data: Uint16Array.of(0x3c00, 0), dtype: "float16" })).toEqual([1, 0]);
  expect(one("float32", 7, [])).toEqual([7]);
});

test("rejects lossy conversions of dtypes", () => {
  const cases: [string, unknown][] = [
    ["int32", [0.5, 1]], ["int32", [2 ** 31, 0]], ["int32", BigInt64Array.of(2n ** 40n, 0n)], ["uint8", [-1, 0]],
    ["int64", [1.5, 0]], ["int64", [2 ** 60, 0]], ["float32", Int32Array.of(2 ** 24 + 1, 0)], ["float32", [1e39, 0]],
    ["float16", [70000, 0]], ["bool", [2, 0]], ["uint64", [-1, 0]], ["int64", [NaN, 0]], ["float32", BigInt64Array.of(2n ** 62n + 1n, 0n)],
  ];
  for (const [dtype, value] of cases) expect(() => one(dtype, value), `${dtype} ${String(value)}`).toThrow(/'t' is .*do not fit/);
});

test("flat arrays are reshaped with the known sizes", () => {
  const spec = (name: string, shape: (string | number)[]) => ({ name, dtype: "float32", shape, role: "input" as const, feeds: null });
  const specs = [spec("a", ["n", "m"]), spec("b", ["n", 3]), spec("c", ["m"])];
  const result = feed(specs, { a: new Float32Array(8), b: new Float32Array(6), c: { data: new Float32Array(4), dims: [4] } });
  expect([...result.values()].map((t) => t.dims)).toEqual([[2, 4], [2, 3], [4]]);
  expect(() => feed(specs.slice(0, 1), { a: new Float32Array(8) })).toThrow(/hint: pass \{ data, dims \}/);
});

test("schedules", () => {
  const at = (s: (step: number, total: number) => number) => [1, 2, 3, 4, 5].map((i) => Number(s(i, 5).toFixed(6)));
  expect(at(constant(2))).toEqual([2, 2, 2, 2, 2]);
  expect(at(linear(4))).toEqual([4, 3, 2, 1, 0]);
  expect(at(cosine(1))).toEqual([1, 0.853553, 0.5, 0.146447, 0]);
  expect(at(stepwise(1, 2, 0.5))).toEqual([1, 1, 0.5, 0.5, 0.25]);
  expect(at(warmup(3, constant(4)))).toEqual([1, 2, 3, 4, 4]);
});

test("every public name is documented", () => {
  const source = ["index.ts", "text/index.ts"].map((f) => readFileSync(`${ROOT}/web/packages/onnxtrain/src/${f}`, "utf8")).join("");
  const names = [...source.matchAll(/\{([^}]*)\}/g)].flatMap((m) => m[1]!.split(",").map((n) => n.trim().replace(/^type /, ""))).filter(Boolean);
  expect(names.length).toBeGreaterThan(40);
  const docs = readFileSync(`${ROOT}/docs/web.md`, "utf8");
  expect(names.filter((n) => !new RegExp(`\\b${n}\\b`).test(docs))).toEqual([]);
});
