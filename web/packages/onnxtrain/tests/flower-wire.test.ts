import { readFileSync } from "node:fs";
import { gzipSync } from "node:zlib";
import { build } from "vite";
import { expect, test } from "vitest";
import type { HostTensor } from "../src/dtypes.js";
import { exportKey, importKey, newKey, pem, publicKeyLine, sign, subtle, toDer } from "../src/flower/connection.js";
import { makeReply, readMetadata, writeNode, type Metadata } from "../src/flower/messages.js";
import { readNpy, writeNpy } from "../src/flower/messages.js";
import { addContent, addObject, readContent, readTree, writeTree, type Content, type Objects } from "../src/flower/messages.js";
import { readValues, writeValues } from "../src/flower/messages.js";
import { Fields, Writer, textBytes } from "../src/flower/wire.js";
import { runPython, ROOT } from "./support.js";

interface Golden {
  readonly reply: { id: string; request: string };
  readonly failure: { id: string; request: string };
  readonly objects: Readonly<Record<string, string | number>>;
  readonly heartbeat: string;
  readonly activate: string;
  readonly pull_object: string;
  readonly push_object: string;
}
/** Generated with the flwr package: tests/flower/inside/golden.py. */
const golden = JSON.parse(readFileSync(`${ROOT}/tests/flower/golden.json`, "utf8")) as Golden;

const hex = (data: Uint8Array): string => Buffer.from(data).toString("hex");
const NODE = 2n ** 63n + 11n;
const RUN = 2n ** 64n - 2n;
const ID = "cd".repeat(32);

const tensor = (dtype: string, dims: number[], data: HostTensor["data"]): HostTensor => ({ dtype, dims, data });
const content: Content = {
  arrays: {
    arrays: {
      // Same rounding as numpy's linspace, which computes in float64.
      "fc.weight": tensor("float32", [3, 4], Float32Array.from({ length: 12 }, (_, i) => -1 + i * (2 / 11))),
      double: tensor("float64", [2], Float64Array.of(0.1, -2.5e300)),
      scalar: tensor("float32", [], Float32Array.of(-7.25)),
      "größe €": tensor("float32", [0, 2], new Float32Array()),
      whole: tensor("int64", [2], BigInt64Array.of(3n, -(2n ** 40n))),
      twin: tensor("float32", [5], new Float32Array(5).fill(0.5)),
      "twin again": tensor("float32", [5], new Float32Array(5).fill(0.5)),
      long: tensor("float32", [2621447], new Float32Array(2621447)),
    },
  },
  metrics: {
    metrics: {
      "num-examples": 42n, loss: 0.125, down: -9n, large: 2n ** 64n - 3n,
      doubles: [2, -0.5], wholes: [5n, -600n], larges: [2n ** 63n + 1n, 7n],
    },
  },
  config: {
    config: {
      yes: true, no: false, text: "añb", none: "", raw: Uint8Array.of(1, 254), zero: 0n,
      nought: 0, texts: ["", "z"], truths: [false, true], raws: [new Uint8Array(), Uint8Array.of(7)], empty: [],
    },
  },
};
const request: Metadata = {
  runId: RUN, messageId: ID, from: 1n, to: NODE, replyTo: "", group: "7", createdAt: 1800000000.5, ttl: 1234.25,
  type: "train", fromTask: 2n ** 63n + 99n,
};

test("replies are byte-identical to Flower's and can be parsed", async () => {
  const reply = await makeReply(NODE, request, { content }, 1800000000.5, 2.5);
  const { arrays } = readContent(reply.id, reply.objects)["arrays"] as { arrays: Record<string, HostTensor> };
  expect(arrays["long"]!.data.every((x) => x === 0) && arrays["long"]!.dims).toEqual([2621447]);
  expect(hex(reply.request)).toBe(golden.reply.request);
  expect(reply.id).toBe(golden.reply.id);
  expect([...reply.objects.keys()].sort()).toEqual(Object.keys(golden.objects).sort());
  for (const [id, data] of reply.objects) {
    const expected = golden.objects[id]!;
    expect(typeof expected === "number" ? data.length : hex(data)).toBe(expected);
  }
});

test("failures and small calls are byte-identical to Flower's", async () => {
  const failure = await makeReply(NODE, request, { failure: { code: 2n, reason: "no data" } }, 1800000000.5, 2.5);
  expect(failure.id).toBe(golden.failure.id);
  expect(hex(failure.request)).toBe(golden.failure.request);
  expect(hex(writeNode(NODE).setDouble(2, 30).done())).toBe(golden.heartbeat);
  expect(hex(new Writer().setBytes(1, textBytes("KEY")).setDouble(2, 120).done())).toBe(golden.activate);
  const pull = () => writeNode(NODE).uint(2, RUN).text(3, ID);
  expect(hex(pull().done())).toBe(golden.pull_object);
  expect(hex(pull().bytes(4, textBytes("abc")).text(5, "s").done())).toBe(golden.push_object);
});

test("content, metadata and trees survive a round trip", async () => {
  const objects: Objects = new Map();
  const { long, ...arrays } = (content["arrays"] as { arrays: Record<string, HostTensor> }).arrays;
  expect(long!.data.length).toBeGreaterThan(1e6); // checked in the first test; comparing it element by element is slow
  const small: Content = { ...content, arrays: { arrays } };
  const tree = await addObject("Message", [await addContent(small, objects)], new Uint8Array(), objects);
  expect(readContent(tree.id, objects)).toEqual(small);
  expect(readTree(writeTree(tree).done())).toEqual(tree);
  const message = new Fields(Buffer.from(golden.reply.request, "hex")).all(2)[0]!;
  expect(readMetadata(message)).toMatchObject({ runId: RUN, from: NODE, to: 1n, replyTo: ID, ttl: 1234.25, toTask: 2n ** 63n + 99n });
  const values = { a: [1n, -2n], b: 0.5, c: [], d: [true] };
  expect(readValues(writeValues(values))).toEqual(values);
});

test("rejects truncated data and mixed lists", () => {
  const whole = Buffer.from(golden.pull_object, "hex");
  for (const size of [1, 5, 12, whole.length - 1]) expect(() => new Fields(whole.subarray(0, size))).toThrow(/cannot parse a response/);
  expect(() => writeValues({ mixed: [1, "a"] })).toThrow(/values of one type/);
  const file = writeNpy(tensor("float32", [2], new Float32Array(2)));
  expect(() => readNpy(file.subarray(0, file.length - 1))).toThrow(/7 bytes for shape \[2\]/);
  expect(() => readNpy(textBytes("no array"))).toThrow(/not an .npy file/);
});

const NUMPY = `
import io, sys, numpy as np
make = {"c": lambda: np.arange(6, dtype="<f4").reshape(2, 3), "f": lambda: np.asfortranarray(np.arange(24, dtype="<f4").reshape(2, 3, 4)),
        "b": lambda: np.arange(4, dtype=">f8"), "s": lambda: np.asarray(3, "<i4"), "h": lambda: np.ones(2, "<f2")}
out = io.BytesIO(); np.save(out, make[sys.argv[1]]()); print(out.getvalue().hex())
`;
test("reads every memory order of numpy and writes the same bytes as numpy", () => {
  const file = (kind: string) => new Uint8Array(Buffer.from(runPython(NUMPY, kind).trim(), "hex"));
  expect([...readNpy(file("f")).data]).toEqual(Array.from({ length: 24 }, (_, i) => i));
  expect(readNpy(file("b"))).toEqual(tensor("float64", [4], Float64Array.of(0, 1, 2, 3)));
  for (const kind of ["c", "s", "h"]) expect(hex(writeNpy(readNpy(file(kind))))).toBe(hex(file(kind)));
});

test("signatures are DER-encoded, and keys survive serialization", async () => {
  const pair = new Uint8Array(96).fill(1);
  expect(hex(toDer(pair)).slice(0, 8)).toBe("30640230");
  pair.set([0, 0, 0x80], 0);
  expect(hex(toDer(pair)).slice(0, 14)).toBe("3063022f008001");
  const key = await importKey(await exportKey(await newKey(true)));
  expect(Buffer.from(await pem(key.publicKey)).toString()).toMatch(/^-----BEGIN PUBLIC KEY-----\n([\w+/=]{1,64}\n)+-----END PUBLIC KEY-----\n$/);
  // OpenSSH format: key type and curve, each with its length, then a point of 97 bytes.
  const [kind, text] = (await publicKeyLine(key)).trim().split(" ");
  const line = Buffer.from(text!, "base64");
  expect(kind).toBe("ecdsa-sha2-nistp384");
  expect(line.subarray(0, 39).toString("latin1")).toBe("\0\0\0\x13ecdsa-sha2-nistp384\0\0\0\bnistp384\0\0\0a");
  expect([line.length, line[39]]).toEqual([136, 4]);
  const raw = new Uint8Array(await subtle().sign({ name: "ECDSA", hash: "SHA-256" }, key.privateKey, Buffer.from("time")));
  const checked = await subtle().verify({ name: "ECDSA", hash: "SHA-256" }, key.publicKey, raw, Buffer.from("time"));
  expect(checked).toBe(true);
  expect((await sign(key.privateKey, "time"))[0]).toBe(0x30);
});

test("adds at most 12 KB to a page", async () => {
  const size = async (...names: string[]) => {
    const input = names.map((name) => `${ROOT}/web/packages/onnxtrain/src/${name}`);
    const rollupOptions = { input, preserveEntrySignatures: "strict", external: /^onnxruntime/ } as const;
    const made = await build({ logLevel: "silent", configFile: false, worker: { format: "es" }, build: { write: false, rollupOptions } });
    return gzipSync((made as { output: { code?: string }[] }).output.map((o) => o.code ?? "").join("")).length;
  };
  const more = (await size("index.ts", "flower/index.ts")) - (await size("index.ts"));
  console.log(`onnxtrain/flower: ${more} bytes`);
  expect(more).toBeGreaterThan(1000);
  expect(more).toBeLessThan(12_000);
});
