// A client of a federation in Node: node node.mjs URL ARTIFACTS DATA.json [STORE]
import { readFileSync } from "node:fs";
import { Trainer } from "onnxtrain";
import { fileNodeStore, FlowerNode } from "onnxtrain/flower";
import { columns } from "./columns.mjs";

const [url, artifacts, data, folder] = process.argv.slice(2);
const trainer = await Trainer.create({ artifacts });
const node = new FlowerNode(url, {
  trainer,
  dataset: columns(JSON.parse(readFileSync(data, "utf8"))),
  ...(folder ? { store: fileNodeStore(folder) } : {}),
  onMessage: (message) => console.log(message),
  onRound: ({ type, round, metrics, seconds }) => console.log(type, round, metrics, `${seconds.toFixed(2)} s`),
});
for (const name of ["SIGINT", "SIGTERM"]) process.once(name, () => void node.leave().then(() => process.exit(0)));
await node.join();
await node.done;
console.log("left", node.traffic);
