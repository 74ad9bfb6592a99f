// Run the nodes of a pack in JavaScript runtimes and compare the outputs. Used by probe.mjs (Node)
// and probe.html (browser).

const ARRAYS = {
  float: Float32Array, double: Float64Array, float16: Uint16Array, int8: Int8Array,
  int16: Int16Array, int32: Int32Array, int64: BigInt64Array, uint8: Uint8Array,
  uint16: Uint16Array, uint32: Uint32Array, uint64: BigUint64Array, bool: Uint8Array,
};
const ORT_TYPES = { float: "float32", double: "float64" };

function bytesOf(base64) {
  const text = atob(base64);
  return Uint8Array.from(text, (c) => c.charCodeAt(0));
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** Returns the elements of a tensor of pack.json as a typed array. */
export function elements(tensor) {
  const bytes = bytesOf(tensor.data);
  return new ARRAYS[tensor.type](bytes.buffer);
}

function numbers(data, type) {
  // Runtimes with Float16Array return numbers, others return the bits.
  const bits = type === "float16" && data instanceof Uint16Array;
  return Array.from(data, (v) => (bits ? half(v) : Number(v)));
}

/** Compares outputs, a list of {dims, data}; returns "right" or "wrong" and the largest error. */
export function compare(outputs, expected) {
  let worst = 0;
  for (const [i, tensor] of expected.entries()) {
    const { dims, data } = outputs[i];
    if (JSON.stringify([...dims].map(Number)) !== JSON.stringify(tensor.dims)) {
      const message = `shape ${JSON.stringify([...dims])}, not ${JSON.stringify(tensor.dims)}`;
      return { status: "wrong", message };
    }
    const a = numbers(data, tensor.type);
    const b = numbers(elements(tensor), tensor.type);
    const exact = !["float", "double", "float16"].includes(tensor.type);
    const rtol = tensor.type === "float16" ? 1e-2 : 1e-3;
    const scale = b.reduce((m, v) => (Number.isFinite(v) ? Math.max(m, Math.abs(v)) : m), 1e-3);
    let differ = 0;
    for (const [j, v] of b.entries()) {
      const error = Math.abs(a[j] - v);
      if (Number.isFinite(error)) worst = Math.max(worst, error);
      const limit = exact || !Number.isFinite(v) ? 0 : rtol * Math.abs(v) + rtol * 0.1 * scale;
      if (!(Object.is(a[j], v) || a[j] === v || error <= limit)) differ += 1;
    }
    if (differ) {
      const shape = tensor.dims.join("x") || "scalar";
      const message = `${differ} of ${b.length} numbers differ (${shape})`;
      return { status: "wrong", error: worst, message };
    }
  }
  return { status: "right", error: worst };
}

async function inOrt(ort, bytes, node, provider) {
  const options = { graphOptimizationLevel: "disabled", logSeverityLevel: 4 };
  if (provider) options.executionProviders = [provider];
  if (provider && !["cpu", "wasm"].includes(provider)) {
    // Fail instead of falling back to the CPU.
    options.extra = { session: { disable_cpu_ep_fallback: "1" } };
  }
  const session = await ort.InferenceSession.create(bytes, options);
  try {
    const feeds = {};
    for (const x of node.inputs) {
      feeds[x.name] = new ort.Tensor(ORT_TYPES[x.type] ?? x.type, elements(x), x.dims);
    }
    const values = await session.run(feeds);
    return node.outputs.map((y) => ({ dims: values[y.name].dims, data: values[y.name].data }));
  } finally {
    await session.release();
  }
}

async function inOnnxjs(onnx, bytes, node, provider) {
  const types = { float: "float32", double: "float64", int64: "int32" }; // onnxjs has no int64 tensors
  const session = new onnx.InferenceSession({ backendHint: provider || "cpu" });
  await session.loadModel(bytes);
  const inputs = node.inputs.map((x) => {
    let data = elements(x);
    if (x.type === "int64") data = Int32Array.from(data, Number);
    return new onnx.Tensor(data, types[x.type] ?? x.type, x.dims);
  });
  const values = await session.run(inputs);
  return node.outputs.map((y) => ({
    dims: values.get(y.name).dims,
    data: values.get(y.name).data,
  }));
}

/** Runs one node; returns {status, error, message}. */
export async function probe(runtime, library, bytes, node, provider) {
  const run = runtime === "onnxjs" ? inOnnxjs : inOrt;
  let outputs;
  try {
    outputs = await run(library, bytes, node, provider);
  } catch (error) {
    const lines = String(error?.message ?? error).split("\n").map((line) => line.trim());
    return { status: "refused", message: (lines.find(Boolean) ?? "").slice(0, 300) };
  }
  return compare(outputs, node.outputs);
}

/** Returns the content of a results file. */
export function summary(pack, runtime, version, provider, answers) {
  const results = {};
  for (const { id, file, inputs, outputs, ...about } of pack.nodes) {
    if (id in answers) results[id] = { ...about, ...answers[id] };
  }
  const date = new Date().toISOString().slice(0, 10);
  return { format: pack.format, runtime, version, provider, date, onnx: pack.onnx, results };
}

/** Formats how many results have each status. */
export function counts(results) {
  const states = Object.values(results).map((r) => r.status);
  return ["right", "wrong", "refused", "crashed"]
    .map((s) => `${states.filter((t) => t === s).length} ${s}`)
    .join(", ");
}
