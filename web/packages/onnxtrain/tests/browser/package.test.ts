import { execFileSync } from "node:child_process";
import { cpSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import { createServer } from "vite";
import { afterAll, beforeAll, expect, test } from "vitest";
import { FIXTURES, ROOT, runPython } from "../support.js";
import { start } from "./page.js";
import { bundle, install, pack, serveFolder } from "./project.js";

const folder = mkdtempSync(join(tmpdir(), "onnxtrain-"));
let archive: string;
beforeAll(() => {
  archive = pack(folder);
});
afterAll(() => rmSync(folder, { recursive: true }));

test("the package trains in an empty Node project, and contains only its own small files", () => {
  const own = join(folder, "node");
  install(own, archive, "onnxruntime-node");
  const installed = join(own, "node_modules/onnxtrain");
  expect(readdirSync(installed).sort()).toEqual(["LICENSE", "README.md", "dist", "package.json"]);
  const names = readdirSync(join(installed, "dist"), { recursive: true }) as string[];
  const gzipped = (chosen: (name: string) => boolean) =>
    gzipSync(Buffer.concat(names.filter((n) => n.endsWith(".js") && chosen(n)).map((n) => readFileSync(join(installed, "dist", n))))).length;
  const [main, all] = [gzipped((n) => !n.startsWith("flower")), gzipped(() => true)];
  console.log(`package: ${main} bytes after gzip, ${all} with onnxtrain/flower`);
  expect(main).toBeLessThan(40 * 1024);
  expect(all - main).toBeLessThan(12_000);
  writeFileSync(
    join(own, "main.js"),
    `import { Trainer } from "onnxtrain";
     const trainer = await Trainer.create({ artifacts: ${JSON.stringify(`${FIXTURES}/mlp-wasm`)} });
     const { loss } = await trainer.step({ x: new Float32Array(20).fill(0.5), labels: [1, 2] });
     console.log(JSON.stringify({ loss, device: trainer.device }));
     await trainer.dispose();`,
  );
  const printed = execFileSync("node", ["main.js"], { cwd: own, encoding: "utf8" });
  const result = JSON.parse(printed) as { loss: number; device: string };
  expect(result.device).toBe("node");
  expect(result.loss).toBeGreaterThan(0);
});

test("packing a clean clone builds it first", () => {
  const web = join(folder, "clone/web");
  const made = /\/(node_modules|dist|public|\.fixtures)$/;
  cpSync(`${ROOT}/web`, web, { recursive: true, filter: (path) => !made.test(path) });
  symlinkSync(`${ROOT}/web/node_modules`, join(web, "node_modules"));
  const out = join(folder, "clone/packed");
  mkdirSync(out);
  const names = execFileSync("tar", ["-tzf", pack(out, web, false)], { encoding: "utf8" }).split("\n");
  for (const name of ["LICENSE", "README.md", "dist/index.js", "dist/index.d.ts"]) expect(names).toContain(`package/${name}`);
  expect(readFileSync(`${ROOT}/web/packages/onnxtrain/LICENSE`, "utf8")).toBe(readFileSync(`${ROOT}/LICENSE`, "utf8"));
});

test("the Node example resumes from Python's checkpoint, and Python from the example's", () => {
  const own = join(folder, "example");
  install(own, archive, "onnxruntime-node");
  cpSync(`${ROOT}/examples/node/train.mjs`, join(own, "train.mjs"));
  cpSync(`${FIXTURES}/mlp-wasm/trained.safetensors`, join(own, "run.safetensors"));
  const printed = execFileSync("node", ["train.mjs", `${FIXTURES}/mlp-wasm`, "run.safetensors"], { cwd: own, encoding: "utf8" });
  expect(printed).toMatch(/^4 parameters, at step 20\n/);
  expect(printed.trim().split("\n").length).toBe(6);
  const steps = runPython(
    `
import sys, onnx
from onnxtrain import Trainer
trainer = Trainer(sys.argv[1]); trainer.load(sys.argv[2] + "/run.safetensors"); onnx.checker.check_model(sys.argv[2] + "/model.onnx")
print(trainer.global_step)
`,
    `${FIXTURES}/mlp-wasm`, own,
  );
  expect(Number(steps)).toBe(20 + 5 * 63);
});

test("without ONNX Runtime the error names the package to install", () => {
  const own = join(folder, "bare");
  install(own, archive);
  expect(existsSync(join(own, "node_modules/onnxruntime-node"))).toBe(false);
  writeFileSync(
    join(own, "main.js"),
    `import { Trainer } from "onnxtrain";
     await Trainer.create({ artifacts: ${JSON.stringify(`${FIXTURES}/mlp-wasm`)} }).catch((e) => console.log(e.name, e.message));`,
  );
  const printed = execFileSync("node", ["main.js"], { cwd: own, encoding: "utf8" });
  expect(printed).toMatch(/^RuntimeError onnxruntime-node cannot be loaded: .*\nhint: npm install onnxruntime-node/s);
});

/** Creates a Vite project without configuration, with a page that trains. */
function viteProject(name: string): string {
  const own = join(folder, name);
  install(own, archive, "onnxruntime-web", "vite");
  mkdirSync(join(own, "src"));
  writeFileSync(join(own, "index.html"), '<link rel="icon" href="data:,"><script type="module" src="/src/main.ts"></script>');
  writeFileSync(
    join(own, "src/main.ts"),
    `import { Trainer } from "onnxtrain";
     const messages: string[] = [];
     const onMessage = (m: string) => messages.push(m);
     try {
       const device = new URLSearchParams(location.search).get("device") as "wasm" | "webgpu";
       const trainer = await Trainer.create({ artifacts: "/art/", device, onMessage });
       const { loss } = await trainer.step({ x: new Float32Array(20).fill(0.5), labels: [1, 2] });
       document.title = JSON.stringify({ loss, device: trainer.device, messages });
       await trainer.dispose();
     } catch (error) {
       document.title = JSON.stringify({ error: String(error), messages });
     }`,
  );
  cpSync(`${FIXTURES}/mlp-web`, join(own, "public/art"), { recursive: true });
  return own;
}

/** Opens the project's page and checks that it trains on both devices. */
async function trained(address: string): Promise<void> {
  const browser = await start({ webgpu: true });
  try {
    for (const device of ["wasm", "webgpu"]) {
      const page = await browser.newPage();
      await page.goto(`${address}?device=${device}`);
      await page.waitForFunction(() => document.title.startsWith("{"));
      const result = JSON.parse(await page.title()) as { loss: number };
      // No messages: training runs in a worker and on the requested device.
      expect(result).toEqual({ loss: expect.any(Number) as number, device, messages: [] });
      expect(result.loss).toBeGreaterThan(0);
      await page.close();
    }
  } finally {
    await browser.close();
  }
}

test("trains in a worker with Vite's development server", async () => {
  const root = viteProject("vite-dev");
  const server = await createServer({ root, configFile: false, logLevel: "silent", server: { port: 0, fs: { strict: false } } });
  try {
    await server.listen();
    await trained(server.resolvedUrls!.local[0]!);
  } finally {
    await server.close();
  }
});

test("trains in a worker in a Vite build", async () => {
  const own = viteProject("vite-build");
  bundle(own);
  const site = await serveFolder(join(own, "dist"));
  try {
    await trained(site.address);
  } finally {
    site.server.close();
  }
});
