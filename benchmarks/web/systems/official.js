/** The training build that onnxruntime-web had until 1.19.2. */
import * as ort from "/node_modules/onnxruntime-web-training/dist/ort.training.wasm.min.mjs";

export async function prepare(task, { optimizer }) {
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = "/node_modules/onnxruntime-web-training/dist/";
  const base = `${task.base}official-${optimizer}/`;
  const session = await ort.TrainingSession.create({
    checkpointState: `${base}checkpoint`, trainModel: `${base}training_model.onnx`,
    evalModel: `${base}eval_model.onnx`, optimizerModel: `${base}optimizer_model.onnx`,
  }, { executionProviders: ["wasm"] }).catch((error) => {
    // What C++ throws arrives as the number of its place in memory.
    throw typeof error === "number" ? new Error("its session cannot be made; the runtime gives no reason") : error;
  });
  const feeds = task.batches.map(({ x, labels }) => ({
    x: new ort.Tensor("float32", x, task.dims),
    labels: new ort.Tensor("int64", BigInt64Array.from(labels, BigInt), [task.batch]),
  }));
  const loss = session.trainingOutputNames[0];
  let next = 0;
  return {
    losses: optimizer === "adamw" ? "official" : "sgd",
    async train(steps) {
      const losses = [];
      for (let i = 0; i < steps; i++) {
        const [at, of] = task.at(next++);
        const found = await session.runTrainStep({ x: feeds[at].x, labels: feeds[of].labels });
        losses.push(found[loss].data[0]);
        await session.runOptimizerStep();
        await session.lazyResetGrad();
      }
      return losses;
    },
  };
}
