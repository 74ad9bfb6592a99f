// Serves the page: node examples/style_transfer/page/serve.mjs [MODELS] [PORT]
import { existsSync, readFileSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { extname, join, normalize, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const ROOT = fileURLToPath(new URL("../../../", import.meta.url));
const TYPES = {
  ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css",
  ".json": "application/json", ".wasm": "application/wasm", ".png": "image/png",
};
const FOLDERS = {
  "/ort/": join(ROOT, "web/node_modules/onnxruntime-web/dist/"),
  "/onnxjs/": join(process.env.ONNXJS_MODULES ?? join(ROOT, "tests/lowering/onnxjs/node_modules"), "onnxjs/dist/"),
  "/models/": join(ROOT, "runs/style_transfer/"),
  "/": HERE,
};

/** Serves the page, the runtimes and the models; `folders` maps additional path prefixes to directories. */
export function serve(folders = {}, port = 0) {
  const routes = Object.entries({ ...folders, ...FOLDERS, ...folders }); // the first match wins
  const server = createServer((request, response) => {
    // Required for SharedArrayBuffer, and so for threads in ONNX Runtime.
    response.setHeader("Cross-Origin-Opener-Policy", "same-origin");
    response.setHeader("Cross-Origin-Embedder-Policy", "require-corp");
    const path = normalize(decodeURIComponent(new URL(request.url, "http://x").pathname));
    if (path === "/empty.html") return response.setHeader("Content-Type", "text/html").end("<!doctype html>");
    const [prefix, folder] = routes.find(([p]) => path.startsWith(p));
    const file = join(folder, path === "/" ? "index.html" : path.slice(prefix.length));
    if (!existsSync(file) || !statSync(file).isFile()) return response.writeHead(404).end();
    response.setHeader("Content-Type", TYPES[extname(file)] ?? "application/octet-stream");
    return response.end(readFileSync(file));
  });
  return new Promise((done) => {
    server.listen(port, "localhost", () => {
      done({ server, address: `http://localhost:${server.address().port}/` });
    });
  });
}

if (process.argv[1] && resolve(process.argv[1]) === fileURLToPath(import.meta.url)) {
  const [models, port] = process.argv.slice(2);
  const site = await serve(models ? { "/models/": resolve(models) } : {}, Number(port ?? 8080));
  console.log(`Style transfer: ${site.address}`);
}
