import { execFileSync } from "node:child_process";
import { cpSync, mkdtempSync, readFileSync, renameSync, rmSync, symlinkSync, truncateSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, expect, test } from "vitest";
import { ArtifactError, Artifacts, CheckpointError, ManifestError, parseManifest, Trainer } from "../src/index.js";
import { withoutHashes } from "../src/manifest.js";
import { filesOf, fixture, FIXTURES, ROOT } from "./support.js";

const folder = mkdtempSync(join(tmpdir(), "onnxtrain-"));
afterAll(() => rmSync(folder, { recursive: true }));
const source = `${FIXTURES}/mlp-frozen-wasm`;

test("loads artifacts from a directory, a map, an object, File objects and a URL", async () => {
  const f = await fixture("mlp-frozen-wasm");
  const files = filesOf(source);
  const server = createServer((request, response) => {
    const data = files.get(decodeURIComponent(request.url!.split("/").at(-1)!));
    response.writeHead(data ? 200 : 404).end(data);
  }).listen(0);
  const address = `http://localhost:${(server.address() as AddressInfo).port}/art`;
  const list = [...files].map(([name, data]) => new File([data as Uint8Array<ArrayBuffer>], name));
  for (const artifacts of [source, `${source}/`, files, Object.fromEntries(files), list, address]) {
    const trainer = await Trainer.create({ artifacts, device: "node", threads: 1, seed: 5 });
    expect((await trainer.step(f.batches[0]!)).loss).toBeCloseTo(f.expected.losses[0]!, 4);
    await trainer.dispose();
  }
  await expect(Artifacts.load(`${address}x/no/`)).resolves.toBeDefined();
  files.delete("step_model.onnx");
  files.delete("training_model.onnx");
  await expect(Trainer.create({ artifacts: address })).rejects.toThrow(/training_model.onnx: cannot be read: .*HTTP 404/);
  server.close();
});

test("errors name a missing or damaged file", async () => {
  for (const name of ["training_model.onnx", "optimizer_model.onnx", "weights.bin", "checkpoint", "manifest.json"]) {
    const files = filesOf(source);
    const data = files.get(name)!.slice();
    files.delete(name);
    const gone = Trainer.create({ artifacts: files, device: "node" });
    await expect(gone).rejects.toThrow(ArtifactError);
    await expect(gone).rejects.toThrow(`${name}: cannot be read`);
    data[data.length >> 1]! ^= 64;
    files.set(name, data);
    const damaged = Trainer.create({ artifacts: files, device: "node" });
    const kind = { checkpoint: CheckpointError, "manifest.json": Error }[name] ?? ArtifactError;
    await expect(damaged).rejects.toThrow(kind);
    await expect(damaged).rejects.toThrow(name);
  }
});

test("a path that the server answers with a page of the app is reported as such", async () => {
  const server = createServer((_, response) => response.writeHead(200, { "Content-Type": "text/html" }).end("<!doctype html>")).listen(0);
  const address = `http://localhost:${(server.address() as AddressInfo).port}/art`;
  const failure = Trainer.create({ artifacts: address });
  await expect(failure).rejects.toThrow(ArtifactError);
  await expect(failure).rejects.toThrow(
    `manifest.json: cannot be read: ${address}/manifest.json is a web page; the server has no such file\n` +
      "hint: pass the directory that contains manifest.json as `artifacts`; Vite serves the files in public/",
  );
  server.close();
});

test("Node reads regular files in the directory of the artifacts only", async () => {
  const load = (own: string) => Trainer.create({ artifacts: own, device: "node", threads: 1 });
  const copy = (name: string) => {
    const own = join(folder, name);
    cpSync(source, own, { recursive: true });
    return own;
  };
  const pipe = copy("pipe");
  rmSync(join(pipe, "checkpoint"));
  execFileSync("mkfifo", [join(pipe, "checkpoint")]);
  await expect(load(pipe)).rejects.toThrow("checkpoint: cannot be read: not a regular file but a pipe, a device or a socket");
  const device = copy("device");
  rmSync(join(device, "manifest.json"));
  symlinkSync("/dev/zero", join(device, "manifest.json"));
  await expect(load(device)).rejects.toThrow(`manifest.json: cannot be read: it is a link that leads out of '${device}'`);
  const link = copy("link");
  rmSync(join(link, "training_model.onnx"));
  symlinkSync(join(source, "training_model.onnx"), join(link, "training_model.onnx"));
  await expect(load(link)).rejects.toThrow("training_model.onnx: cannot be read: it is a link that leads out of");
  const inside = copy("inside");
  renameSync(join(inside, "checkpoint"), join(inside, "first"));
  symlinkSync("first", join(inside, "checkpoint"));
  symlinkSync(inside, join(folder, "whole"));
  await (await load(join(folder, "whole"))).dispose();
  const large = copy("large");
  truncateSync(join(large, "manifest.json"), 2 ** 27 + 1);
  await expect(load(large)).rejects.toThrow("manifest.json: cannot be read: the file has 134217729 bytes, the limit is 134217728");
  const trainer = await load(source);
  await expect(trainer.load(join(pipe, "checkpoint"))).rejects.toThrow("cannot be read: not a regular file but a pipe, a device or a socket");
  await expect(trainer.load("/dev/zero")).rejects.toThrow("not a regular file");
  await expect(trainer.load(source)).rejects.toThrow("cannot be read: this is a directory");
  await trainer.dispose();
});

test("a missing inference model is reported when it is first used", async () => {
  const own = join(folder, "own");
  cpSync(source, own, { recursive: true });
  const trainer = await Trainer.create({ artifacts: own, device: "node" });
  rmSync(join(own, "inference_model.onnx"));
  await expect(trainer.exportModel()).rejects.toThrow(/inference_model.onnx: cannot be read/);
  await trainer.dispose();
});

const text = readFileSync(`${FIXTURES}/mlp-wasm/manifest.json`, "utf8");
type Loose = Record<string, any>;
const changed = (change: (m: Loose) => void): string => {
  const data = JSON.parse(text) as Loose;
  change(data);
  return JSON.stringify(data);
};

test.each<[string, string, RegExp]>([
  ["invalid JSON", "{", /manifest.json: not JSON/],
  ["a list", "[]", /not an object/],
  ["another version", changed((m) => (m["format"] = 2)), /format 2, but this version reads format 1\nhint/],
  ["no models", changed((m) => delete m["models"]), /'models' is missing/],
  ["an unknown entry", changed((m) => (m["extra"] = 1)), /unknown entries: extra/],
  ["entries named like Object.prototype properties", changed((m) => Object.assign(m, { toString: 1, constructor: 2 })), /unknown entries: toString, constructor/],
  ["an unknown role", changed((m) => (m["models"][0].inputs[0].role = "x")), /models\[0\]: inputs\[0\]: role: expected one of/],
  ["a path", changed((m) => (m["models"][0].file = "../x")), /file: expected a plain file name, got "..\/x"/],
  ["an invalid hash", changed((m) => (m["models"][0].sha256 = "12")), /sha256: expected a sha256/],
  ["an output that feeds an unknown input", changed((m) => (m["models"][3].outputs[3].feeds = "x.y")), /feeds 'x.y', which is not an input/],
  ["a negative size", changed((m) => (m["parameters"][0].shape = [-1])), /shape\[0\]: expected an integer >= 0, got -1/],
])("rejects a manifest with %s", (_, source, message) => {
  expect(() => parseManifest(source)).toThrow(ManifestError);
  expect(() => parseManifest(source)).toThrow(message);
});

test("accepts models that only other trainers run", () => {
  const update = {
    role: "update", target: "cpu", steps_per_call: 1, file: "update_model.onnx", sha256: "",
    members: ["fc1.weight"], in_place: ["parameter"],
    inputs: [
      { name: "parameter", dtype: "float32", shape: ["n"], role: "parameter", feeds: null },
      { name: "scalar.0", dtype: "float32", shape: [], role: "scalar", feeds: null },
    ],
    outputs: [{ name: "parameter.out", dtype: "float32", shape: ["n"], role: "parameter", feeds: "parameter" }],
  };
  expect(parseManifest(changed((m) => m["models"].push(update))).models.at(-1)).toEqual(update);
  const wrong = changed((m) => m["models"].push({ ...update, members: [1] }));
  expect(() => parseManifest(wrong)).toThrow(/members\[0\]: expected a name, got 1/);
});

test("required entries match the JSON schema in the Python package", () => {
  const schema = JSON.parse(readFileSync(`${ROOT}/src/onnxtrain/manifest.schema.json`, "utf8")) as Loose;
  for (const name of schema["required"] as string[]) {
    expect(() => parseManifest(changed((m) => delete m[name]))).toThrow(ManifestError);
  }
  expect(Object.keys(schema["properties"]).sort()).toEqual(Object.keys(JSON.parse(text) as object).sort());
});

test("withoutHashes returns the manifest as stored in checkpoints", () => {
  const plain = withoutHashes(text);
  expect(plain).not.toMatch(/"sha256":"[0-9a-f]{64}"/);
  expect(JSON.parse(plain)).toEqual(JSON.parse(changed((m) => {
    m["files"] = {};
    for (const model of m["models"]) model.sha256 = "";
  })));
});
