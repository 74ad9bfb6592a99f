// Runs models in onnxjs: node run.cjs JOBS BACKEND, with JOBS a JSON list of
// {model, inputs: [{type, dims, data}]}; prints one JSON line per job.
const fs = require("fs");
delete globalThis.fetch; // its presence sends onnxjs to the network for local files
const onnx = require("onnxjs");
const [jobsFile, backend] = process.argv.slice(2);

async function run(job) {
  const session = new onnx.InferenceSession({ backendHint: backend });
  await session.loadModel(new Uint8Array(fs.readFileSync(job.model)));
  const make = { float32: Float32Array, int32: Int32Array, bool: Uint8Array };
  const inputs = job.inputs.map(
    (x) => new onnx.Tensor(make[x.type].from(x.data), x.type, x.dims),
  );
  const outputs = await session.run(inputs);
  return [...outputs].map(([name, t]) => ({
    name,
    dims: [...t.dims],
    data: Array.from(t.data, (v) => (Number.isFinite(Number(v)) ? Number(v) : String(v))),
  }));
}

(async () => {
  for (const job of JSON.parse(fs.readFileSync(jobsFile, "utf8"))) {
    let line;
    try {
      line = { outputs: await run(job) };
    } catch (error) {
      line = { error: String(error.message || error).split("\n")[0] };
    }
    console.log(JSON.stringify(line));
  }
})();
