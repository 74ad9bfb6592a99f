import { defineConfig } from "vite";

// onnxtrain starts its own worker, and the runtime loads its .wasm file from the module's directory.
export default defineConfig({
  esbuild: { jsx: "automatic" },
  worker: { format: "es" },
  build: { target: "es2022" },
  optimizeDeps: { exclude: ["onnxtrain", "onnxruntime-web"] },
});
