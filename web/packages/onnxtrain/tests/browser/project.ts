import { execFileSync } from "node:child_process";
import { existsSync, mkdirSync, readdirSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { extname, join, normalize } from "node:path";
import { ROOT } from "../support.js";

const MODULES = `${ROOT}/web/node_modules`;
const TYPES: Record<string, string> = {
  ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".json": "application/json", ".wasm": "application/wasm",
  ".css": "text/css", ".svg": "image/svg+xml", ".png": "image/png",
};

/** Packs the package as npm would publish it and returns the path of the archive; `built`: what `npm run build` made is packed. */
export function pack(folder: string, web = `${ROOT}/web`, built = true): string {
  const options = ["--pack-destination", folder, ...(built ? ["--ignore-scripts"] : [])];
  execFileSync("npm", ["run", "pack", "--", ...options], { cwd: web, stdio: "pipe" });
  return join(folder, readdirSync(folder).find((n) => n.endsWith(".tgz"))!);
}

/** Installs the archive in a new project without network access; other packages are linked from this workspace. */
export function install(own: string, archive: string, ...others: string[]): void {
  mkdirSync(own, { recursive: true });
  const links = Object.fromEntries(["onnxruntime-common", ...others].map((n) => [n, `file:${MODULES}/${n}`]));
  const project = {
    private: true, type: "module",
    dependencies: { onnxtrain: `file:${archive}`, ...links },
    overrides: { "onnxruntime-common": links["onnxruntime-common"] },
  };
  writeFileSync(join(own, "package.json"), JSON.stringify(project));
  const options = ["--offline", "--ignore-scripts", "--no-audit", "--no-fund", "--install-links=false"];
  execFileSync("npm", ["install", ...options], { cwd: own, stdio: "pipe" });
}

/** Builds a project with Vite. */
export function bundle(own: string): void {
  execFileSync("node", [join(own, "node_modules/vite/bin/vite.js"), "build", "--logLevel", "error"], { cwd: own, stdio: "inherit" });
}

/** Serves a directory as a plain static host, without special headers. */
export async function serveFolder(folder: string): Promise<{ server: Server; address: string }> {
  const server = createServer((request, response) => {
    const path = decodeURIComponent(new URL(request.url!, "http://x").pathname);
    const file = join(folder, normalize(path.endsWith("/") ? `${path}index.html` : path));
    if (!existsSync(file) || !statSync(file).isFile()) return response.writeHead(404).end();
    return response.setHeader("Content-Type", TYPES[extname(file)] ?? "application/octet-stream").end(readFileSync(file));
  });
  await new Promise<void>((resolve) => server.listen(0, resolve));
  return { server, address: `http://localhost:${(server.address() as AddressInfo).port}/` };
}
