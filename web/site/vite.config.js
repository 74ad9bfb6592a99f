import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { defineConfig } from "vite";
import { PAGES } from "./pages.js";
import { shell } from "./shell.js";

// Required for SharedArrayBuffer, and so for threads in ONNX Runtime.
const headers = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
};

const file = (path) => fileURLToPath(new URL(path, import.meta.url));
const pages = ["index.html", ...PAGES.map((p) => `${p.folder}/index.html`)].map(file).filter(existsSync);

export default defineConfig({
  // Relative URLs, so that the site can be deployed at any path.
  base: "./",
  appType: "mpa",
  plugins: [shell()],
  worker: { format: "es" },
  build: { target: "es2022", rollupOptions: { input: pages } },
  optimizeDeps: { exclude: ["onnxtrain", "onnxruntime-web"] },
  server: { headers },
  preview: { headers },
});
