/** jax-js. Arguments are consumed: `.ref` keeps a value for another use. */
import * as jax from "@jax-js/jax";

const { numpy: np, nn, lax } = jax;
const layer = (w, name, x) => np.matmul(x, w[`${name}.weight`].transpose()).add(w[`${name}.bias`]);

const forwards = {
  mlp: (w, x) => layer(w, "fc2", nn.relu(layer(w, "fc1", x))),
  cnn: (w, x) => {
    const conv = (name, v) =>
      nn.relu(lax.conv(v, w[`${name}.weight`], [1, 1], "VALID").add(w[`${name}.bias`].reshape([1, -1, 1, 1])));
    let h = conv("conv2", conv("conv1", x));
    h = np.max(h.reshape([-1, 64, 12, 2, 12, 2]), [3, 5]).reshape([-1, 9216]);
    return layer(w, "fc2", nn.relu(layer(w, "fc1", h)));
  },
  transformer: (w, x) => {
    const dense = (name, v) => np.matmul(v, w[`${name}.weight`]).add(w[`${name}.bias`]);
    const norm = (name, v) => {
      const centred = v.ref.sub(np.mean(v, -1, { keepdims: true }));
      const variance = np.mean(np.square(centred.ref), -1, { keepdims: true });
      return centred.div(np.sqrt(variance.add(1e-5))).mul(w[`${name}.weight`]).add(w[`${name}.bias`]);
    };
    const heads = (v) => v.reshape([-1, 28, 4, 8]).transpose([0, 2, 1, 3]);
    let h = dense("embed", x).add(w.position);
    for (const b of ["block0", "block1"]) {
      const y = norm(`${b}.norm1`, h.ref);
      const q = heads(dense(`${b}.q`, y.ref));
      const k = heads(dense(`${b}.k`, y.ref)).transpose([0, 1, 3, 2]);
      const v = heads(dense(`${b}.v`, y));
      const mixed = np.matmul(nn.softmax(np.matmul(q, k).mul(8 ** -0.5), -1), v);
      h = h.add(dense(`${b}.out`, mixed.transpose([0, 2, 1, 3]).reshape([-1, 28, 32])));
      h = h.ref.add(dense(`${b}.down`, nn.relu(dense(`${b}.up`, norm(`${b}.norm2`, h)))));
    }
    return layer(w, "head", np.mean(norm("norm", h), 1));
  },
};

export async function prepare(task, { model, optimizer, device }) {
  const there = await jax.init(device);
  if (!there.includes(device)) throw new Error(`no device ${device}`);
  jax.defaultDevice(device);
  const array = (data, shape) => np.array(data).reshape(shape);
  const each = (make) => Object.fromEntries(task.weights.map((t) => [t.name, make(t)]));
  let weights = each(({ data, shape }) => array(data.slice(), shape));
  let first = each(({ shape }) => np.zeros(shape));
  let second = each(({ shape }) => np.zeros(shape));
  const batches = task.batches.map(({ x, labels }) => ({ x: array(x.slice(), task.dims), y: nn.oneHot(np.array(labels.slice(), { dtype: np.int32 }), 10) }));
  const loss = (w, x, y) => np.sum(nn.logSoftmax(forwards[model](w, x), -1).mul(y)).mul(-1 / task.batch);
  const rate = task.rates[optimizer];
  const names = task.weights.map((t) => t.name);
  const every = (make) => Object.fromEntries(names.map((n) => [n, make(n)]));
  const sgd = jax.jit((w, x, y) => {
    const [l, g] = jax.valueAndGrad(loss)(every((n) => w[n].ref), x, y);
    return [l, every((n) => w[n].sub(g[n].mul(rate)))];
  });
  const adamw = jax.jit((w, m, v, x, y, low, high) => {
    const [l, g] = jax.valueAndGrad(loss)(every((n) => w[n].ref), x, y);
    const m2 = every((n) => m[n].mul(0.9).add(g[n].ref.mul(0.1)));
    const v2 = every((n) => v[n].mul(0.999).add(np.square(g[n]).mul(0.001)));
    const w2 = every((n) => {
      const root = np.sqrt(v2[n].ref).div(high.ref).add(1e-8);
      return w[n].mul(1 - rate * 0.01).sub(m2[n].ref.div(low.ref).div(root).mul(rate));
    });
    low.dispose();
    high.dispose();
    return [l, w2, m2, v2];
  });
  let next = 0;
  return {
    losses: optimizer,
    async train(steps) {
      const found = [];
      for (let i = 0; i < steps; i++) {
        const [at, of] = task.at(next++);
        const [{ x }, { y }] = [batches[at], batches[of]];
        let l;
        if (optimizer === "sgd") [l, weights] = sgd(weights, x.ref, y.ref);
        else {
          const [low, high] = [1 - 0.9 ** next, Math.sqrt(1 - 0.999 ** next)].map((n) => np.array(n));
          [l, weights, first, second] = adamw(weights, first, second, x.ref, y.ref, low, high);
        }
        found.push(l);
        await jax.blockUntilReady(weights);
      }
      return await Promise.all(found.map(async (l) => (await l.data())[0]));
    },
  };
}
