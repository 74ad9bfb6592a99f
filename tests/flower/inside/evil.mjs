// A malicious node that sends invalid replies without training: node evil.mjs SUPERLINK WEB KIND
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [url, web, kind] = process.argv.slice(2);
// The package does not export the protocol layer: bundle it from the sources.
const { build } = await import(pathToFileURL(join(web, "node_modules/esbuild/lib/main.js")).href).then((m) => m.default);
const parts = ["connection", "messages", "wire"];
const { outputFiles: [made] } = await build({
  stdin: { contents: parts.map((n) => `export * from "./${n}.js";`).join("\n"), loader: "ts", resolveDir: join(web, "packages/onnxtrain/src/flower") },
  bundle: true, format: "esm", platform: "node", write: false, external: ["onnxruntime-*"],
});
const { bytesText, digests, FleetConnection, makeReply, newKey, readContent, readMetadata, readTree, sleep, writeNode, Writer } =
  await import(`data:text/javascript;base64,${Buffer.from(made.text).toString("base64")}`);

const HUGE = 4_000_000;
const first = (arrays) => Object.entries(arrays)[0];
const replaced = (arrays, change) => {
  const [name, tensor] = first(arrays);
  return { ...arrays, [name]: { ...tensor, ...change(tensor) } };
};
const KINDS = {
  nan: (arrays) => replaced(arrays, ({ data }) => ({ data: data.slice().fill(NaN) })),
  shape: (arrays) => replaced(arrays, () => ({ dims: [7], data: new Float32Array(7) })),
  huge: (arrays) => replaced(arrays, () => ({ dims: [HUGE], data: new Float32Array(HUGE) })),
  // Says that it is small, and is not.
  disguised: (arrays) => replaced(arrays, () => ({ data: new Float32Array(HUGE) })),
  names: (arrays) => {
    const { [first(arrays)[0]]: moved, ...rest } = arrays;
    return { ...rest, evil: moved };
  },
  double: (arrays) => replaced(arrays, ({ data }) => ({ dtype: "float64", data: Float64Array.from(data) })),
  // Flower cannot decode it.
  broken: (arrays) => replaced(arrays, () => ({ dims: ["x"] })),
  heavy: (arrays) => arrays,
  listed: (arrays) => arrays,
};

const { signal } = new AbortController();
const link = new FleetConnection(url, await newKey(), signal, (message) => console.log(message));
const key = await link.prepare();
await link.call("register-node", new Writer().setBytes(1, key).done());
const id = (await link.call("activate-node", new Writer().setBytes(1, key).setDouble(2, 600).done())).uint(1);
console.log(`joined as node ${id}`);

const inRun = (run) => writeNode(id).uint(2, run);

// A message is given out before all of its objects have reached the SuperLink.
async function pulled(body) {
  for (;;) {
    const object = await link.call("pull-object", body);
    if (!object.uint(1)) throw new Error("the SuperLink has no such object");
    if (object.uint(2)) return object.bytes(3);
    await sleep(200, signal);
  }
}

async function answer(asked, tree) {
  const objects = new Map();
  for (const digest of digests(tree)) {
    objects.set(digest, await pulled(inRun(asked.runId).text(3, digest).done()));
  }
  const { arrays } = readContent(tree.id, objects).arrays;
  const metrics = { "num-examples": kind === "heavy" ? 10n ** 15n : 24n, loss: kind === "listed" ? [1, 2] : 0.5, accuracy: 0.5, steps: 3n };
  const content = { arrays: { arrays: KINDS[kind](arrays) }, metrics: { metrics } };
  const reply = await makeReply(id, asked, { content }, link.now(), 1);
  await link.call("confirm-message-received", inRun(asked.runId).text(3, asked.messageId).done());
  const wanted = await link.call("push-messages", reply.request);
  for (const digest of wanted.all(3).map(bytesText)) {
    const body = inRun(asked.runId).text(3, digest).bytes(4, reply.objects.get(digest)).text(5, wanted.text(4));
    await link.call("push-object", body.done());
  }
  console.log(`sent ${wanted.all(3).length} objects`);
}

for (;;) {
  const waiting = await link.call("pull-messages", writeNode(id).done());
  const [message] = waiting.all(2);
  const [tree] = waiting.all(3);
  if (message && tree) await answer(readMetadata(message), readTree(tree)).catch((error) => console.log(error.message));
  else await sleep(500, signal);
}
