import { execFileSync } from "node:child_process";
import { cpSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { extname, join } from "node:path";
import { gzipSync } from "node:zlib";
import { afterAll, beforeAll, expect, test } from "vitest";
import { FIXTURES, ROOT } from "../support.js";
import { start } from "./page.js";

const folder = mkdtempSync(join(tmpdir(), "onnxtrain-"));
const modules = `${ROOT}/web/node_modules`;
afterAll(() => rmSync(folder, { recursive: true }));

/** Makes an empty project with what `npm pack` gives, and the runtimes. */
function project(name: string, ...runtimes: string[]): string {
  const own = join(folder, name);
  mkdirSync(join(own, "node_modules"), { recursive: true });
  cpSync(join(folder, "package"), join(own, "node_modules/onnxtrain"), { recursive: true });
  for (const m of ["onnxruntime-common", ...runtimes]) symlinkSync(join(modules, m), join(own, "node_modules", m));
  writeFileSync(join(own, "package.json"), '{ "type": "module" }');
  return own;
}

beforeAll(() => {
  const own = `${ROOT}/web/packages/onnxtrain`;
  execFileSync("npm", ["pack", "--pack-destination", folder], { cwd: own, stdio: "pipe" });
  const packed = readdirSync(folder).find((n) => n.endsWith(".tgz"))!;
  execFileSync("tar", ["-xzf", packed], { cwd: folder });
});

test("our own code is small", () => {
  const dist = join(folder, "package/dist");
  const code = readdirSync(dist).filter((n) => n.endsWith(".js")).map((n) => readFileSync(join(dist, n)));
  expect(code.length).toBeGreaterThan(10);
  expect(gzipSync(Buffer.concat(code)).length).toBeLessThan(30_000);
});

test("the package trains in an empty Node project", () => {
  const own = project("node", "onnxruntime-node");
  writeFileSync(
    join(own, "main.js"),
    `import { Trainer } from "onnxtrain";
     const trainer = await Trainer.create({ artifacts: ${JSON.stringify(`${FIXTURES}/mlp-wasm`)} });
     const { loss } = await trainer.step({ x: new Float32Array(20).fill(0.5), labels: [1, 2] });
     console.log(JSON.stringify({ loss, device: trainer.device }));
     await trainer.dispose();`,
  );
  const found = JSON.parse(execFileSync("node", ["main.js"], { cwd: own, encoding: "utf8" })) as { loss: number; device: string };
  expect(found.device).toBe("node");
  expect(found.loss).toBeGreaterThan(0);
});

test("the package is bundled by Vite and trains in a worker", async () => {
  const own = project("vite", "onnxruntime-web");
  writeFileSync(join(own, "index.html"), '<script type="module" src="./main.js"></script>');
  writeFileSync(
    join(own, "main.js"),
    `import { Trainer } from "onnxtrain";
     const trainer = await Trainer.create({ artifacts: "/art/", device: "wasm" });
     const { loss } = await trainer.step({ x: new Float32Array(20).fill(0.5), labels: [1, 2] });
     await trainer.dispose();
     document.title = "loss " + loss;`,
  );
  writeFileSync(join(own, "vite.config.js"), 'export default { worker: { format: "es" }, build: { target: "es2022" } };');
  execFileSync("node", [join(modules, "vite/bin/vite.js"), "build", "--logLevel", "error"], { cwd: own, stdio: "inherit" });
  cpSync(`${FIXTURES}/mlp-wasm`, join(own, "dist/art"), { recursive: true });
  const types: Record<string, string> = { ".html": "text/html", ".js": "text/javascript", ".wasm": "application/wasm" };
  const server = createServer((request, response) => {
    const name = request.url === "/" ? "/index.html" : request.url!;
    try {
      const data = readFileSync(join(own, "dist", name));
      response.setHeader("Content-Type", types[extname(name)] ?? "application/octet-stream").end(data);
    } catch {
      response.writeHead(404).end();
    }
  }).listen(0);
  const browser = await start();
  try {
    const page = await browser.newPage();
    const errors: string[] = [];
    page.on("pageerror", (error) => errors.push(error.message));
    await page.goto(`http://localhost:${(server.address() as AddressInfo).port}/`);
    await page.waitForFunction(() => document.title.startsWith("loss"), undefined, { timeout: 30_000 }).catch(() => undefined);
    expect(errors).toEqual([]);
    expect(Number((await page.title()).split(" ")[1])).toBeGreaterThan(0);
  } finally {
    await browser.close();
    server.close();
  }
}, 120_000);
