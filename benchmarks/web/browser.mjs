/** One Chromium, one page per system, and what serves them. */
import { existsSync, readFileSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const TYPES = { ".js": "text/javascript", ".mjs": "text/javascript", ".json": "application/json", ".wasm": "application/wasm" };
const MODULES = "/node_modules";
const IMPORTS = {
  onnxtrain: "/onnxtrain/index.js",
  "onnxruntime-web/wasm": `${MODULES}/onnxruntime-web/dist/ort.wasm.bundle.min.mjs`,
  "onnxruntime-web/webgpu": `${MODULES}/onnxruntime-web/dist/ort.webgpu.bundle.min.mjs`,
  "@jax-js/jax": `${MODULES}/@jax-js/jax/dist/index.js`,
};
const SCRIPTS = ["tfjs/dist/tf.min.js", "tfjs-backend-wasm/dist/tf-backend-wasm.min.js", "tfjs-backend-webgpu/dist/tf-backend-webgpu.min.js"];
const head = `<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><script type="importmap">${JSON.stringify({ imports: IMPORTS })}</script>`;
const tags = SCRIPTS.map((s) => `<script src="${MODULES}/@tensorflow/${s}"></script>`).join("");

/** Serves without the headers that shared memory needs: everybody has one thread. */
export function serve(nets) {
  const folders = { onnxtrain: join(HERE, "../../web/packages/onnxtrain/dist"), nets, node_modules: join(HERE, "node_modules"), systems: join(HERE, "systems") };
  const server = createServer((request, response) => {
    const path = decodeURIComponent(new URL(request.url, "http://x").pathname);
    const [, first, ...rest] = normalize(path).split("/");
    if (first === "" || first === "tfjs") return response.setHeader("Content-Type", "text/html").end(head + (first ? tags : ""));
    const file = folders[first] && join(folders[first], ...rest);
    if (!file || !existsSync(file)) return response.writeHead(404).end();
    return response.setHeader("Content-Type", TYPES[extname(file)] ?? "application/octet-stream").end(readFileSync(file));
  });
  return new Promise((resolve) => server.listen(0, () => resolve({ close: () => server.close(), address: `http://localhost:${server.address().port}/` })));
}

export async function start() {
  const executablePath = process.env.CHROMIUM ?? ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);
  if (!executablePath) throw new Error("no browser: install chromium, or name one in CHROMIUM");
  const args = ["--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-unsafe-swiftshader"];
  return await chromium.launch({ executablePath, args });
}

/** How long a page may take to get ready or to train, in ms. */
const LIMIT = 300_000;
/** Errors that a page's console showed. */
const pageErrors = new WeakMap();

/** Opens a page in which one system is ready to train. */
export async function open(browser, address, system, settings) {
  const page = await (await browser.newContext()).newPage();
  const complaints = [];
  page.on("pageerror", (error) => complaints.push(error.message));
  page.on("console", (message) => message.type() === "error" && complaints.push(message.text()));
  if (process.env.VERBOSE) page.on("console", (message) => console.log(`  [${system.name}] ${message.text()}`));
  await page.goto(address + (system.file === "tfjs" ? "tfjs" : ""));
  try {
    await within(LIMIT, page.evaluate(`(async () => {
      const { task } = await import("/systems/task.js");
      const { prepare } = await import("/systems/${system.file}.js");
      globalThis.dispatches = 0;
      const pass = globalThis.GPUComputePassEncoder?.prototype;
      if (pass) for (const name of ["dispatchWorkgroups", "dispatchWorkgroupsIndirect"]) {
        const own = pass[name];
        pass[name] = function (...args) { globalThis.dispatches++; return own.apply(this, args); };
      }
      const settings = ${JSON.stringify({ ...settings, ...system })};
      const found = await task(settings.model);
      globalThis.system = await prepare(found, settings);
      globalThis.wanted = found.losses[globalThis.system.losses];
    })()`));
  } catch (error) {
    await page.close();
    throw new Error([error.message.split("\n")[0], ...complaints].join("; "));
  }
  pageErrors.set(page, complaints);
  return page;
}

/** Trains some steps; gives losses, and milliseconds per step on the clock and of the page's own thread. */
export async function train(page, steps, limit = LIMIT) {
  const busy = await threadSeconds(page);
  const trained = await within(limit, page.evaluate(`(async () => {
    const before = globalThis.dispatches;
    const began = performance.now();
    const losses = await globalThis.system.train(${steps});
    const ms = (performance.now() - began) / ${steps};
    return { losses, ms, dispatches: (globalThis.dispatches - before) / ${steps}, wanted: globalThis.wanted };
  })()`)).catch((error) => {
    throw new Error([error.message.split("\n")[0], ...(pageErrors.get(page) ?? [])].join("; "));
  });
  return { ...trained, cpu: (1000 * ((await threadSeconds(page)) - busy)) / steps };
}

const clients = new WeakMap();
async function threadSeconds(page) {
  if (!clients.has(page)) {
    const client = await page.context().newCDPSession(page);
    await client.send("Performance.enable", { timeDomain: "threadTicks" });
    clients.set(page, client);
  }
  const { metrics } = await clients.get(page).send("Performance.getMetrics");
  return metrics.find((m) => m.name === "TaskDuration").value;
}

const within = (ms, work) => {
  let timer;
  const late = new Promise((_, reject) => { timer = setTimeout(() => reject(new Error(`no answer within ${ms / 1000} s`)), ms); });
  return Promise.race([work, late]).finally(() => clearTimeout(timer));
};
