import { execFileSync, spawnSync } from "node:child_process";
import { cpSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createServer } from "vite";
import { afterAll, beforeAll, expect, test } from "vitest";
import { python, ROOT } from "../support.js";
import { start } from "./page.js";
import { pack } from "./project.js";

const LIBRARY = "@huggingface/transformers@4.3.1";
const QUIET = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"];
/** Too large for a dependency of this workspace; these tests are skipped if npm cannot resolve it. */
const available = spawnSync("npm", ["view", LIBRARY, "version", "--prefer-offline", "--fetch-retries=0"], { encoding: "utf8", timeout: 60_000 }).status === 0;

const folder = mkdtempSync(join(tmpdir(), "transformers-"));
const TEXTS = ["a good film", "a great book", "the meal was lovely", "this day is fine", "a bad film", "an awful book", "the meal was dull", "that day is poor"];
const LABELS = [1, 1, 1, 1, 0, 0, 0, 0];
/** Unseen sentences with words of both classes. */
const TRIED = `await classify("a lovely film"), await classify("that book was awful")`;

beforeAll(() => {
  if (!available) return;
  const archive = pack(mkdtempSync(join(folder, "archive-")));
  writeFileSync(join(folder, "package.json"), JSON.stringify({ private: true, type: "module" }));
  // Install the library first: its prerelease of ONNX Runtime has to satisfy our peer dependency.
  execFileSync("npm", ["install", ...QUIET, LIBRARY], { cwd: folder, stdio: "pipe" });
  execFileSync("npm", ["install", ...QUIET, archive], { cwd: folder, stdio: "pipe" });
  execFileSync(python(), [`${ROOT}/web/packages/onnxtrain/tests/fixtures/make_encoder.py`, join(folder, "public/models/tiny")]);
  cpSync(`${ROOT}/examples/web/transformers/teach.mjs`, join(folder, "teach.mjs"));
});
afterAll(() => rmSync(folder, { recursive: true }));

/** Returns all installed copies of onnxruntime-web. */
function runtimes(): string[] {
  const names = readdirSync(join(folder, "node_modules"), { recursive: true }) as string[];
  return names.filter((n) => n.endsWith("onnxruntime-web/package.json"));
}

test.skipIf(!available)("installs no second copy of the runtime next to Transformers.js", () => {
  expect(runtimes()).toEqual(["onnxruntime-web/package.json"]);
  const { version } = JSON.parse(readFileSync(join(folder, "node_modules/onnxruntime-web/package.json"), "utf8")) as { version: string };
  expect(version).toMatch(/-dev/);
});

test.skipIf(!available)("a head trains on embeddings of Transformers.js in Node", () => {
  writeFileSync(
    join(folder, "main.mjs"),
    `import { env } from "@huggingface/transformers";
     import { teach } from "./teach.mjs";
     Object.assign(env, { allowRemoteModels: false, localModelPath: "./public/models/" });
     const losses = [];
     const classify = await teach("tiny", ${JSON.stringify(TEXTS)}, ${JSON.stringify(LABELS)}, { onLoss: (l) => losses.push(l) });
     console.log("found " + JSON.stringify([losses[0], losses.at(-1), ${TRIED}]));
     process.exit(0);`,
  );
  const printed = execFileSync("node", ["main.mjs"], { cwd: folder, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] });
  const [first, last, ...classes] = JSON.parse(printed.split("found ")[1]!) as number[];
  expect(last).toBeLessThan(0.7 * first!);
  expect(classes).toEqual([1, 0]);
});

test.skipIf(!available)("a head trains on embeddings of Transformers.js in a page, with its copy of the runtime", async () => {
  mkdirSync(join(folder, "src"), { recursive: true });
  writeFileSync(join(folder, "index.html"), '<link rel="icon" href="data:,"><script type="module" src="/src/main.js"></script>');
  writeFileSync(
    join(folder, "src/main.js"),
    `import { env } from "@huggingface/transformers";
     import { teach } from "../teach.mjs";
     try {
       Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/models/" });
       env.backends.onnx.wasm.wasmPaths = "/node_modules/onnxruntime-web/dist/";
       env.backends.onnx.wasm.numThreads = 1;
       const [losses, messages] = [[], []];
       const classify = await teach("tiny", ${JSON.stringify(TEXTS)}, ${JSON.stringify(LABELS)}, { device: "wasm", onLoss: (l) => losses.push(l), onMessage: (m) => messages.push(m) });
       document.title = JSON.stringify({ result: [losses[0], losses.at(-1), ${TRIED}], messages });
     } catch (error) {
       document.title = JSON.stringify({ result: [], messages: [String(error)] });
     }`,
  );
  expect(existsSync(join(folder, "public/models/tiny/onnx/model.onnx"))).toBe(true);
  const server = await createServer({ root: folder, configFile: false, logLevel: "silent", server: { port: 0 } });
  const browser = await start();
  try {
    await server.listen();
    const page = await browser.newPage();
    await page.goto(server.resolvedUrls!.local[0]!);
    await page.waitForFunction(() => document.title.startsWith("{"));
    const { result: [first, last, ...classes], messages } = JSON.parse(await page.title()) as { result: number[]; messages: string[] };
    expect(messages).toEqual([]);
    expect(last).toBeLessThan(0.7 * first!);
    expect(classes).toEqual([1, 0]);
  } finally {
    await browser.close();
    await server.close();
  }
});
