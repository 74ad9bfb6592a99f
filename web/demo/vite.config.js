import { defineConfig } from "vite";

// With these headers the runtime may use threads.
const headers = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
};

export default defineConfig({
  worker: { format: "es" },
  build: { target: "es2022" },
  optimizeDeps: { exclude: ["onnxtrain", "onnxruntime-web"] },
  server: { headers },
  preview: { headers },
});
