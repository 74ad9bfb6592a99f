import { defineConfig } from "vite";

// The package starts a worker of its own, and the runtime finds its .wasm beside itself.
export default defineConfig({
  esbuild: { jsx: "automatic" },
  worker: { format: "es" },
  build: { target: "es2022" },
  optimizeDeps: { exclude: ["onnxtrain", "onnxruntime-web"] },
});
