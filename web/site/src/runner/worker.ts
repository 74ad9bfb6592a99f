/** The worker of `Runner`. */
import * as ort from "onnxruntime-web/wasm";
import type { RunResponse, RunRequest } from "./runner.js";

let session: ort.InferenceSession | undefined;

async function answer({ model, threads, feeds }: RunRequest): Promise<RunResponse> {
  if (model) {
    ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? threads ?? 1 : 1;
    session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"] });
    return { outputs: {} };
  }
  const given = Object.entries(feeds ?? {}).map(([name, t]) => [name, new ort.Tensor("float32", t.data, [...t.dims])] as const);
  const results = await session!.run(Object.fromEntries(given));
  return {
    outputs: Object.fromEntries(Object.entries(results).map(([name, t]) => [name, { data: t.data as Float32Array<ArrayBuffer>, dims: t.dims }])),
  };
}

onmessage = async ({ data }: MessageEvent<RunRequest>) => {
  try {
    postMessage(await answer(data));
  } catch (error) {
    postMessage({ outputs: {}, error: (error as Error).message } satisfies RunResponse);
  }
};
