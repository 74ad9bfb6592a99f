import { defineConfig } from "vite";

// With these headers the runtime may use threads.
const headers = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
};

// What the built page may do: compile wasm, start workers of its own, and ask its own origin for files.
const POLICY = [
  "default-src 'none'", "script-src 'self' 'wasm-unsafe-eval' blob:", "worker-src 'self' blob:", "connect-src 'self' blob:",
  "style-src 'self'", "img-src 'self' data: blob:", "base-uri 'none'", "form-action 'none'",
].join("; ");

/** Says the policy in the built page; the development server has scripts and styles of its own in it. */
const policy = {
  name: "content-security-policy",
  apply: "build",
  transformIndexHtml: () => [
    { tag: "meta", attrs: { "http-equiv": "Content-Security-Policy", content: POLICY }, injectTo: "head-prepend" },
  ],
};

export default defineConfig({
  // The page finds its files wherever it is put: at an address of its own, or below a path.
  base: "./",
  plugins: [policy],
  worker: { format: "es" },
  build: { target: "es2022" },
  optimizeDeps: { exclude: ["onnxtrain", "onnxruntime-web"] },
  server: { headers },
  preview: { headers },
});
