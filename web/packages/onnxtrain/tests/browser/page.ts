import { existsSync, readFileSync } from "node:fs";
import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { extname, join, normalize } from "node:path";
import { chromium, type Browser, type BrowserContext, type Page } from "playwright-core";
import { FIXTURES, ROOT } from "../support.js";

const TYPES: Record<string, string> = {
  ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript",
  ".json": "application/json", ".wasm": "application/wasm",
};
const FOLDERS: Record<string, string> = {
  onnxtrain: `${ROOT}/web/packages/onnxtrain/dist`,
  ort: `${ROOT}/web/node_modules/onnxruntime-web/dist`,
  fixtures: FIXTURES,
};
const IMPORTS = {
  onnxtrain: "/onnxtrain/index.js",
  "onnxtrain/text": "/onnxtrain/text/index.js",
  "onnxruntime-web/training": "/onnxtrain/training/index.js",
  "onnxruntime-web/wasm": "/ort/ort.wasm.bundle.min.mjs",
  "onnxruntime-web/webgpu": "/ort/ort.webgpu.bundle.min.mjs",
};
const HTML = `<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
<script type="importmap">${JSON.stringify({ imports: IMPORTS })}</script>
<script type="module">import * as onnxtrain from "onnxtrain"; globalThis.onnxtrain = onnxtrain;</script>`;

declare global {
  /** The package, in pages. */
  var onnxtrain: typeof import("../../src/index.js");
}

/** Serves the package, the runtime and the fixtures; `isolated` adds the COOP and COEP headers that threads need. */
export function serve(isolated: boolean): Promise<{ server: Server; address: string }> {
  const server = createServer((request, response) => {
    if (isolated) {
      response.setHeader("Cross-Origin-Opener-Policy", "same-origin");
      response.setHeader("Cross-Origin-Embedder-Policy", "require-corp");
    }
    const path = decodeURIComponent(new URL(request.url!, "http://x").pathname);
    const [, first = "", ...rest] = normalize(path).split("/");
    if (path === "/") return response.setHeader("Content-Type", "text/html").end(HTML);
    const file = FOLDERS[first] && join(FOLDERS[first], ...rest);
    if (!file || !existsSync(file)) return response.writeHead(404).end();
    response.setHeader("Content-Type", TYPES[extname(file)] ?? "application/octet-stream");
    return response.end(readFileSync(file));
  });
  return new Promise((resolve) => {
    server.listen(0, () => {
      resolve({ server, address: `http://localhost:${(server.address() as AddressInfo).port}/` });
    });
  });
}

const BROWSERS = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];

/** Returns the path of the system's Chromium, or the environment variable CHROMIUM. */
export function browserPath(): string {
  const result = process.env["CHROMIUM"] ?? BROWSERS.find(existsSync);
  if (!result) throw new Error("no browser found: install chromium, or set CHROMIUM");
  return result;
}

/** Timeout in ms, long enough for a busy machine: only a hanging page reaches it. */
export const TIMEOUT = 600_000;

/** Starts the browser, optionally with a software GPU, or a fake camera and microphone. */
export async function start(options: { webgpu?: boolean; camera?: boolean } = {}): Promise<Browser> {
  const executablePath = browserPath();
  const gpu = options.webgpu ? ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"] : [];
  // Chromium's fake camera shows a moving figure, its fake microphone beeps.
  const media = options.camera ? ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"] : [];
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", ...gpu, ...media], timeout: TIMEOUT });
  browser.on("context", (context) => context.setDefaultTimeout(Number(process.env["TIMEOUT"] ?? TIMEOUT)));
  return browser;
}

/** Opens the empty page and collects its errors and warnings. */
export async function openPage(browser: Browser | BrowserContext, address: string): Promise<{ page: Page; pageErrors: string[] }> {
  const page = await ("newContext" in browser ? await browser.newContext() : browser).newPage();
  const pageErrors: string[] = [];
  page.on("pageerror", (error) => pageErrors.push(error.message));
  page.on("console", (message) => {
    if (message.type() === "error" || message.type() === "warning") pageErrors.push(message.text());
  });
  await page.goto(address);
  return { page, pageErrors };
}

/** Results of a training run in a page. */
export interface PageRun {
  device: string;
  losses: number[];
  accuracies: number[];
  evaluated: number;
  logits: number[];
  checkpoint: number[];
  messages: string[];
}

/** Trains on all batches of a fixture in a page. */
export async function train(
  page: Page, name: string, options: { device: string; worker?: boolean; seed?: number; threads?: number },
): Promise<PageRun> {
  return await page.evaluate(async ([name, options]) => {
    const { Trainer, readCheckpoint } = onnxtrain;
    const base = new URL(`/fixtures/${name}/`, location.href);
    const get = async (file: string) => new Uint8Array(await (await fetch(new URL(file, base))).arrayBuffer());
    const expected = JSON.parse(new TextDecoder().decode(await get("expected.json"))) as { inputs: [string, string]; losses: number[] };
    const { tensors } = await readCheckpoint(await get("batches.safetensors"));
    const messages: string[] = [];
    const trainer = await Trainer.create({
      artifacts: base, ...(options as object), onMessage: (m: string) => messages.push(m),
    });
    const batch = (i: number) => Object.fromEntries(expected.inputs.map((n) => [n, tensors.get(`${i}/${n}`)!]));
    const losses: number[] = [];
    const accuracies: number[] = [];
    for (let i = 0; i < expected.losses.length; i++) {
      const result = await trainer.step(batch(i));
      losses.push(result.loss);
      accuracies.push(result["accuracy"]!);
    }
    const evaluated = (await trainer.evaluate([batch(0)])).loss;
    const [input] = expected.inputs;
    const { logits } = await trainer.predict({ [input]: batch(0)[input]! });
    const checkpoint = [...(await trainer.exportCheckpoint())];
    const { device } = trainer;
    await trainer.dispose();
    return { device, losses, accuracies, evaluated, logits: [...(logits!.data as Float32Array)], checkpoint, messages };
  }, [name, options] as const);
}
