/** Where Node finds what pages find by their import map. */
const PLACES = {
  onnxtrain: new URL("../../../web/packages/onnxtrain/dist/index.js", import.meta.url).href,
  "onnxtrain/text": new URL("../../../web/packages/onnxtrain/dist/text/index.js", import.meta.url).href,
  "onnxruntime-web/webgpu": new URL("../node_modules/onnxruntime-web/dist/ort.webgpu.bundle.min.mjs", import.meta.url).href,
};

export const resolve = (name, context, next) => (PLACES[name] ? { url: PLACES[name], shortCircuit: true } : next(name, context));
