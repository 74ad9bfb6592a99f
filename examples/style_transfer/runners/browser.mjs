// Runs models in a Chromium tab: node browser.mjs JOBS ENGINE, with JOBS as for onnxjs.cjs and
// ENGINE "ort" (onnxruntime-web, WebAssembly) or "onnxjs" (its webgl backend).
import { readFileSync, writeFileSync } from "node:fs";
import { browser } from "./chromium.mjs";
import { serve } from "../page/serve.mjs";

const [jobsFile, engine] = process.argv.slice(2);
const ENGINES = {
  async ort({ repeat, dims }) {
    const ort = await import("/ort/ort.wasm.bundle.min.mjs");
    ort.env.wasm.numThreads = 1;
    const session = await ort.InferenceSession.create(globalThis.files.model);
    const image = new ort.Tensor("float32", new Float32Array(globalThis.files.input.buffer), dims);
    return await globalThis.timed(repeat, async () => {
      const outputs = await session.run({ [session.inputNames[0]]: image });
      return outputs[session.outputNames[0]].data;
    });
  },
  async onnxjs({ repeat, dims }) {
    const session = new onnx.InferenceSession({ backendHint: "webgl" });
    await session.loadModel(globalThis.files.model);
    return await globalThis.timed(repeat, async () => {
      const image = new onnx.Tensor(new Float32Array(globalThis.files.input.buffer), "float32", dims);
      return (await session.run([image])).values().next().value.data;
    });
  },
};

const site = await serve({ "/job/": "/" });
const chromium = await browser();
try {
  for (const job of JSON.parse(readFileSync(jobsFile, "utf8"))) {
    const page = await chromium.newPage();
    try {
      await page.goto(`${site.address}empty.html`);
      if (engine === "onnxjs") await page.addScriptTag({ url: "/onnxjs/onnx.min.js" });
      await page.evaluate(async ({ model, input }) => {
        const read = async (name) => new Uint8Array(await (await fetch(`/job/${name}`)).arrayBuffer());
        globalThis.files = { model: await read(model), input: await read(input) };
        globalThis.timed = async (repeat, run) => {
          let [best, data] = [Infinity, undefined];
          for (let i = 0; i < repeat; i++) {
            const start = performance.now();
            data = await run();
            best = Math.min(best, performance.now() - start);
          }
          let text = "";
          for (const byte of new Uint8Array(Float32Array.from(data).buffer)) text += String.fromCharCode(byte);
          return { ms: best, data: btoa(text) };
        };
      }, job);
      const result = await page.evaluate(ENGINES[engine], { dims: job.dims, repeat: job.repeat ?? 1 });
      writeFileSync(job.output, Buffer.from(result.data, "base64"));
      console.log(JSON.stringify({ ms: result.ms }));
    } catch (error) {
      console.log(JSON.stringify({ error: String(error.message || error).split("\n")[0] }));
    }
    await page.close();
  }
} finally {
  await chromium.close();
  site.server.close();
}
