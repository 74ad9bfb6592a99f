const sessions = new Map();

/** Returns the cached session of a model on a device. */
function session(model, device) {
  const key = `${device} ${model}`;
  if (!sessions.has(key)) {
    const runtime = import(new URL(`./ort/ort.${device}.bundle.min.mjs`, import.meta.url).href);
    const entry = runtime.then(async (ort) => ({
      ort,
      session: await ort.InferenceSession.create(model, { executionProviders: [device] }),
    }));
    entry.catch(() => sessions.delete(key));
    sessions.set(key, entry);
  }
  return sessions.get(key);
}

/** Stylizes an image: converts it to a tensor [1, 3, height, width] in 0..255, and back. */
async function styled({ image, model, device }) {
  const { ort, session: net } = await session(model, device);
  const { width, height, data } = image;
  const count = width * height;
  const planes = new Float32Array(3 * count);
  for (let i = 0; i < count; i++) for (let c = 0; c < 3; c++) planes[c * count + i] = data[4 * i + c];
  const start = performance.now();
  const outputs = await net.run({ [net.inputNames[0]]: new ort.Tensor("float32", planes, [1, 3, height, width]) });
  const values = outputs[net.outputNames[0]].data;
  const ms = performance.now() - start;
  const result = new ImageData(width, height);
  for (let i = 0; i < count; i++) {
    for (let c = 0; c < 3; c++) result.data[4 * i + c] = Math.round(values[c * count + i]); // clamped
    result.data[4 * i + 3] = 255;
  }
  return { image: result, ms, device };
}

// Run requests in order: a session cannot run concurrently.
let queue = Promise.resolve();
self.onmessage = ({ data }) => {
  queue = queue.then(async () => {
    try {
      self.postMessage({ request: data.request, ...(await styled(data)) });
    } catch (error) {
      self.postMessage({ request: data.request, error: String(error?.message ?? error) });
    }
  });
};
