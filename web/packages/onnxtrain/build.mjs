/** Builds the package: declarations with TypeScript, and one bundle per entry of `exports` with esbuild. */
import { execFileSync } from "node:child_process";
import { readFileSync, rmSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const { exports } = JSON.parse(readFileSync(`${here}package.json`, "utf8"));
const common = {
  absWorkingDir: here, bundle: true, minify: true, format: "esm", target: "es2022", legalComments: "none", logLevel: "warning",
  external: ["onnxruntime-web", "onnxruntime-web/*", "onnxruntime-common", "onnxruntime-node", "node:*"],
};

// The worker is embedded as a string, because the user's bundler would move or rebuild a separate file.
const { outputFiles: [worker] } = await build({ ...common, entryPoints: ["src/worker.ts"], write: false });
const workerText = {
  name: "worker-text",
  setup: (made) => made.onLoad({ filter: /[\\/]worker-text\.ts$/ }, () => ({ contents: `export const WORKER = ${JSON.stringify(worker.text)};` })),
};

rmSync(`${here}dist`, { recursive: true, force: true });
const entries = Object.values(exports).flatMap((e) => [e.default ?? [], e.node ?? []].flat());
await build({
  ...common,
  entryPoints: entries.map((file) => file.replace("./dist/", "src/").replace(/\.js$/, ".ts")),
  outdir: "dist", outbase: "src", splitting: true, chunkNames: "parts/[hash]", plugins: [workerText],
});
execFileSync(process.execPath, [fileURLToPath(import.meta.resolve("typescript/package.json")).replace("package.json", "bin/tsc"), "-p", here], { stdio: "inherit" });
