// A Flower client in Node: node node.mjs URL ARTIFACTS DATA.json [STORE]
// KEY=file: the key of the node; if the file does not exist, a key is generated, which has to be registered.
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { Trainer } from "onnxtrain";
import { exportKey, fileNodeStore, FlowerNode, importKey, newKey, publicKeyLine } from "onnxtrain/flower";
import { columns } from "./columns.mjs";

const [url, artifacts, data, folder] = process.argv.slice(2);
const file = process.env.KEY;
if (file && !existsSync(file)) {
  const key = await newKey(true);
  writeFileSync(file, await exportKey(key), { mode: 0o600 });
  writeFileSync(`${file}.pub`, await publicKeyLine(key));
  console.log(`generated ${file}; register it: flwr supernode register ${file}.pub`);
  process.exit(0);
}
const trainer = await Trainer.create({ artifacts });
const node = new FlowerNode(url, {
  trainer,
  dataset: columns(JSON.parse(readFileSync(data, "utf8"))),
  ...(file ? { key: await importKey(readFileSync(file, "utf8")) } : {}),
  ...(folder ? { store: fileNodeStore(folder) } : {}),
  onMessage: (message) => console.log(message),
  onRound: ({ type, round, metrics, seconds }) => console.log(type, round, metrics, `${seconds.toFixed(2)} s`),
});
for (const name of ["SIGINT", "SIGTERM"]) process.once(name, () => void node.leave().then(() => process.exit(0)));
await node.join();
await node.done;
console.log("left", node.traffic);
