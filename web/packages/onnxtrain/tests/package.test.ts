import { execFileSync, spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { expect, test } from "vitest";
import { readFileSync } from "node:fs";
import { type OrtModule, requireSupported } from "../src/runtime.js";
import { ROOT } from "./support.js";

test("npm pack builds the package first", () => {
  const folder = `${ROOT}/web/packages/onnxtrain`;
  const output = execFileSync("npm", ["pack", "--dry-run", "--json"], { cwd: folder, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] });
  // Skip the output of the build.
  const [{ files }] = JSON.parse(output.slice(output.indexOf("[\n"))) as [{ files: { path: string }[] }];
  const names = files.map((f) => f.path);
  for (const name of ["package.json", "README.md", "LICENSE", "dist/index.js", "dist/index.d.ts", "dist/flower/index.js", "dist/flower/index.d.ts", "dist/text/index.js", "dist/text/index.d.ts", "dist/training/index.js", "dist/training/node.js", "dist/training/index.d.ts"]) {
    expect(names).toContain(name);
  }
  expect(names.filter((n) => n.startsWith("src/") || n.startsWith("tests/"))).toEqual([]);
});

test("the declarations compile with an older TypeScript library", () => {
  const folder = mkdtempSync(join(tmpdir(), "types-"));
  const settings = {
    target: "ES2022", lib: ["ES2022", "DOM"], module: "ESNext", moduleResolution: "bundler", strict: true, skipLibCheck: false, noEmit: true, types: [],
    paths: { "onnxruntime-web/training": ["./node_modules/onnxtrain/dist/training/index.d.ts"] },
  };
  writeFileSync(join(folder, "tsconfig.json"), JSON.stringify({ compilerOptions: settings, files: ["main.ts", "old.ts"] }));
  writeFileSync(join(folder, "main.ts"), 'import { Trainer } from "onnxtrain";\nexport const create = Trainer.create;\n');
  writeFileSync(join(folder, "old.ts"), `import * as ort from "onnxruntime-web/training";
    export async function train(feeds: ort.InferenceSession.FeedsType, model: ort.TrainingSession.UriOrBuffer): Promise<number> {
      const options: ort.TrainingSessionCreateOptions = { checkpointState: "checkpoint", trainModel: model };
      options.optimizerModel = "optimizer_model.onnx";
      const session: ort.TrainingSession = await ort.TrainingSession.create(options, { executionProviders: ["wasm"] });
      const results: ort.InferenceSession.ReturnType = await session.runTrainStep({ ...feeds, x: new ort.Tensor("float32", [1]) }, ["onnx::loss::8"], { tag: "a" });
      await session.runOptimizerStep({ tag: "b" });
      await session.loadParametersBuffer(new Uint8Array((await session.getContiguousParameters(true)).data as Float32Array), true);
      ort.env.wasm.numThreads = 2;
      return results["onnx::loss::8"]!.data[0] as number;
    }
`);
  mkdirSync(join(folder, "node_modules"));
  symlinkSync(`${ROOT}/web/node_modules/onnxruntime-web`, join(folder, "node_modules/onnxruntime-web"));
  symlinkSync(`${ROOT}/web/node_modules/onnxruntime-common`, join(folder, "node_modules/onnxruntime-common"));
  symlinkSync(`${ROOT}/web/packages/onnxtrain`, join(folder, "node_modules/onnxtrain"));
  execFileSync("npm", ["run", "build"], { cwd: `${ROOT}/web/packages/onnxtrain`, stdio: "pipe" });
  const output = spawnSync(`${ROOT}/web/node_modules/.bin/tsc`, ["-p", folder], { encoding: "utf8" });
  rmSync(folder, { recursive: true });
  expect(output.stdout).toBe("");
  expect(output.status).toBe(0);
});

test("dependency ranges accept every ONNX Runtime, prereleases included; the oldest one is checked on load", () => {
  const { dependencies, peerDependencies } = JSON.parse(readFileSync(`${ROOT}/web/packages/onnxtrain/package.json`, "utf8")) as Record<string, Record<string, string>>;
  // npm takes a prerelease for no other range: transformers.js brings development builds of onnxruntime-web.
  expect([dependencies!["onnxruntime-common"], ...Object.values(peerDependencies!)]).toEqual(["*", "*", "*"]);
  const ort = (version?: string): OrtModule => ({ env: { versions: { common: version } } }) as unknown as OrtModule;
  for (const version of ["1.20.0", "1.31.0-dev.20260914-8d85527a0", "1.100.0", "2.0.0", undefined]) requireSupported(ort(version), "onnxruntime-web");
  for (const version of ["1.19.2", "1.9.0"]) {
    expect(() => requireSupported(ort(version), "onnxruntime-web")).toThrow(`onnxtrain needs ONNX Runtime 1.20 or newer, found ${version}\nhint: npm install onnxruntime-web@latest`);
  }
});
