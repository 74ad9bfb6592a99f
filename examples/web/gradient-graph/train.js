// A custom training loop over two plain graphs; this program holds the weights and the optimizer
// state. `ort` is onnxruntime-web or onnxruntime-node.

/** Initializes weights like torch's nn.Linear, step counters with 1, and other state with 0. */
function initial(ort, gradient, optimizer, lr, random) {
  const state = {};
  for (const { name, type, shape } of optimizer.inputMetadata) {
    const size = shape.reduce((a, b) => a * b, 1);
    const data = type === "int64" ? BigInt64Array.of(1n) : new Float32Array(size);
    if (name.endsWith(".learning_rate")) data.fill(lr);
    if (gradient.inputNames.includes(name)) {
      const layer = name.replace(/\.bias$/, ".weight");
      const bound = 1 / Math.sqrt(optimizer.inputMetadata.find((m) => m.name === layer).shape[1]);
      for (let i = 0; i < size; i++) data[i] = (2 * random() - 1) * bound;
    }
    state[name] = new ort.Tensor(type, data, shape);
  }
  return state;
}

/** Trains on batches of { input, labels }; yields loss and output of each batch. */
export async function* train(ort, graphs, batches, { lr = 1e-3, random = Math.random } = {}) {
  const gradient = await ort.InferenceSession.create(graphs.gradient);
  const optimizer = await ort.InferenceSession.create(graphs.optimizer);
  const names = gradient.inputNames.filter((n) => n !== "input" && n !== "labels");
  const state = initial(ort, gradient, optimizer, lr, random);
  for await (const { input, labels } of batches) {
    const weights = Object.fromEntries(names.map((n) => [n, state[n]]));
    const outputs = await gradient.run({ input, labels, ...weights });
    for (const n of names) state[`${n}.gradient`] = outputs[`${n}_grad`];
    const next = await optimizer.run(state);
    for (const [n, value] of Object.entries(next)) state[n.replace(/\.out$/, "")] = value;
    yield { loss: outputs.loss.data[0], output: outputs.output };
  }
  await gradient.release();
  await optimizer.release();
}
