/** What all systems are given: weights, batches and true losses of one model. */
export async function task(model, base = `/nets/${model}/`, get = async (file) => await (await fetch(base + file)).arrayBuffer()) {
  const facts = JSON.parse(new TextDecoder().decode(await get("task.json")));
  const [stored, data] = await Promise.all([get("weights.bin"), get("batches.bin")]);
  const size = facts.shape.reduce((a, b) => a * b, 1) * facts.batch;
  const weights = facts.weights.map(({ name, shape, offset }) => {
    const count = shape.reduce((a, b) => a * b, 1);
    return { name, shape, data: new Float32Array(stored, 4 * offset, count) };
  });
  const batches = Array.from({ length: facts.count }, (_, i) => ({
    x: new Float32Array(data, 4 * i * size, size),
    labels: new Int32Array(data, 4 * (facts.count * size + i * facts.batch), facts.batch),
  }));
  /** Which images and labels step `i` sees. Later passes mix them, else all is learned by heart and numbers underflow. */
  const at = (i) => [i % facts.count, (i + Math.floor(i / facts.count)) % facts.count];
  return { ...facts, base, weights, batches, at, dims: [facts.batch, ...facts.shape] };
}
