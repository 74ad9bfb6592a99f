// Trains for an epoch as a client does, without a federation: node replay.mjs DIST ARTIFACTS
// A line of JSON in: { device, data, batchSize, weights }. A line of JSON out: the new weights.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { columns } from "../../../web/federated/columns.mjs";

const [dist, artifacts] = process.argv.slice(2);
const { Trainer } = await import(`${dist}/index.js`);
const encoded = ({ data }) => Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("base64");

for await (const line of createInterface({ input: process.stdin })) {
  const { device, data, batchSize, weights } = JSON.parse(line);
  const trainer = await Trainer.create({ artifacts, device });
  for (const [name, text] of Object.entries(weights)) {
    const { dims, dtype } = await trainer.getParameter(name);
    await trainer.setParameter(name, { dims, dtype, data: new Float32Array(new Uint8Array(Buffer.from(text, "base64")).buffer) });
  }
  const dataset = columns(JSON.parse(readFileSync(data, "utf8")));
  for await (const step of trainer.fit(dataset, { epochs: 1, batchSize, shuffle: false })) void step;
  const found = {};
  for (const name of Object.keys(weights)) found[name] = encoded(await trainer.getParameter(name));
  await trainer.dispose();
  console.log(JSON.stringify(found));
}
