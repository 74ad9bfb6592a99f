/** TensorFlow.js; its scripts are loaded by the page. */
const forwards = {
  mlp: (tf, w, x) => tf.relu(x.matMul(w["fc1.weight"], false, true).add(w["fc1.bias"]))
    .matMul(w["fc2.weight"], false, true).add(w["fc2.bias"]),
  // Its convolutions want channels last; the weights are turned once, when they are made.
  cnn: (tf, w, x) => {
    let h = tf.relu(tf.conv2d(x, w["conv1.weight"], 1, "valid").add(w["conv1.bias"]));
    h = tf.relu(tf.conv2d(h, w["conv2.weight"], 1, "valid").add(w["conv2.bias"]));
    h = tf.maxPool(h, 2, 2, "valid").transpose([0, 3, 1, 2]).reshape([-1, 9216]);
    h = tf.relu(h.matMul(w["fc1.weight"], false, true).add(w["fc1.bias"]));
    return h.matMul(w["fc2.weight"], false, true).add(w["fc2.bias"]);
  },
  transformer: (tf, w, x) => {
    const dense = (name, v) => {
      const [given, wanted] = w[`${name}.weight`].shape;
      return v.reshape([-1, given]).matMul(w[`${name}.weight`]).add(w[`${name}.bias`]).reshape([-1, 28, wanted]);
    };
    const norm = (name, v) => {
      const centred = v.sub(v.mean(-1, true));
      const variance = centred.square().mean(-1, true);
      return centred.div(variance.add(1e-5).sqrt()).mul(w[`${name}.weight`]).add(w[`${name}.bias`]);
    };
    const heads = (v) => v.reshape([-1, 28, 4, 8]).transpose([0, 2, 1, 3]);
    let h = dense("embed", x).add(w.position);
    for (const b of ["block0", "block1"]) {
      const y = norm(`${b}.norm1`, h);
      const [q, k, v] = ["q", "k", "v"].map((n) => heads(dense(`${b}.${n}`, y)));
      const mixed = tf.softmax(tf.matMul(q, k, false, true).mul(8 ** -0.5)).matMul(v);
      h = h.add(dense(`${b}.out`, mixed.transpose([0, 2, 1, 3]).reshape([-1, 28, 32])));
      h = h.add(dense(`${b}.down`, tf.relu(dense(`${b}.up`, norm(`${b}.norm2`, h)))));
    }
    return norm("norm", h).mean(1).matMul(w["head.weight"], false, true).add(w["head.bias"]);
  },
};

export async function prepare(task, { model, optimizer, device }) {
  const { tf } = globalThis;
  if (device === "wasm") {
    tf.wasm.setWasmPaths("/node_modules/@tensorflow/tfjs-backend-wasm/dist/");
    tf.wasm.setThreadsCount(1);
  }
  if (!(await tf.setBackend(device))) throw new Error(`no backend ${device}`);
  await tf.ready();
  const weights = Object.fromEntries(task.weights.map(({ name, shape, data }) => {
    const first = tf.tensor(data, shape);
    return [name, tf.variable(shape.length === 4 ? first.transpose([2, 3, 1, 0]) : first)];
  }));
  const batches = task.batches.map(({ x, labels }) => {
    const rows = tf.tensor(x, task.dims);
    return { x: model === "cnn" ? rows.transpose([0, 2, 3, 1]) : rows, y: tf.oneHot(tf.tensor1d(labels, "int32"), 10).cast("float32") };
  });
  const rate = task.rates[optimizer];
  const rule = optimizer === "sgd" ? tf.train.sgd(rate) : tf.train.adam(rate, 0.9, 0.999, 1e-8);
  let next = 0;
  return {
    losses: optimizer === "sgd" ? "sgd" : "adam",
    async train(steps) {
      const found = [];
      for (let i = 0; i < steps; i++) {
        const [at, of] = task.at(next++);
        const [{ x }, { y }] = [batches[at], batches[of]];
        found.push(rule.minimize(() => tf.losses.softmaxCrossEntropy(y, forwards[model](tf, weights, x)), true));
      }
      const losses = [];
      for (const loss of found) {
        losses.push((await loss.data())[0]);
        loss.dispose();
      }
      return losses;
    },
  };
}
