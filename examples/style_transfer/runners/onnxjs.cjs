// Runs models in onnxjs: node onnxjs.cjs JOBS BACKEND, with JOBS a JSON list of
// {model, input, dims, output, repeat}; tensors are raw float32 files. Prints one JSON line per job.
// onnxjs is loaded from NODE_PATH.
const fs = require("fs");
delete globalThis.fetch; // otherwise onnxjs fetches local files over the network
const onnx = require("onnxjs");
const [jobsFile, backend] = process.argv.slice(2);
const floats = (file) => new Float32Array(new Uint8Array(fs.readFileSync(file)).buffer);

async function run({ model, input, dims, output, repeat = 1 }) {
  const session = new onnx.InferenceSession({ backendHint: backend });
  await session.loadModel(new Uint8Array(fs.readFileSync(model)));
  const times = [];
  let data;
  for (let i = 0; i < repeat; i++) {
    const tensor = new onnx.Tensor(floats(input), "float32", dims);
    const start = performance.now();
    const results = await session.run([tensor]);
    data = results.values().next().value.data;
    times.push(performance.now() - start);
  }
  fs.writeFileSync(output, new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  return { ms: Math.min(...times) };
}

(async () => {
  for (const job of JSON.parse(fs.readFileSync(jobsFile, "utf8"))) {
    const line = await run(job).catch((e) => ({ error: String(e.message || e).split("\n")[0] }));
    console.log(JSON.stringify(line));
  }
})();
