/**
 * Fine-tunes in Chromium what finetune.py wrote: speed, memory, frames of the page, losses beside Python's.
 *
 *   node finetune.mjs WORK OUT.json [decoder] [encoder]
 */
import { createReadStream, existsSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { cpus, loadavg } from "node:os";
import { extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";

const WEB = fileURLToPath(new URL("../../web/", import.meta.url));
const { chromium } = createRequire(join(WEB, "package.json"))("playwright-core");
const [work, out, ...chosen] = process.argv.slice(2);
const TYPES = { ".js": "text/javascript", ".mjs": "text/javascript", ".json": "application/json", ".wasm": "application/wasm" };
const FOLDERS = { onnxtrain: join(WEB, "packages/onnxtrain/dist"), ort: join(WEB, "node_modules/onnxruntime-web/dist"), made: work };
const IMPORTS = { onnxtrain: "/onnxtrain/index.js", "onnxtrain/text": "/onnxtrain/text/index.js", "onnxruntime-web/wasm": "/ort/ort.wasm.bundle.min.mjs" };
const HTML = `<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><script type="importmap">${JSON.stringify({ imports: IMPORTS })}</script>
<script type="module">import * as a from "onnxtrain"; import * as b from "onnxtrain/text"; Object.assign(globalThis, { onnxtrain: a, text: b });
globalThis.frames = []; let last = performance.now();
const tick = (now) => { frames.push(now - last); last = now; requestAnimationFrame(tick); }; requestAnimationFrame(tick);</script>`;

const server = createServer((request, response) => {
  response.setHeader("Cross-Origin-Opener-Policy", "same-origin").setHeader("Cross-Origin-Embedder-Policy", "require-corp");
  const path = decodeURIComponent(new URL(request.url, "http://x").pathname);
  const [, first, ...rest] = normalize(path).split("/");
  if (first === "") return response.setHeader("Content-Type", "text/html").end(HTML);
  const file = FOLDERS[first] && join(FOLDERS[first], ...rest);
  if (!file || !existsSync(file)) return response.writeHead(404).end();
  response.setHeader("Content-Type", TYPES[extname(file)] ?? "application/octet-stream").setHeader("Content-Length", statSync(file).size);
  return createReadStream(file).pipe(response);
});
await new Promise((resolve) => server.listen(0, resolve));
const address = `http://localhost:${server.address().port}/`;
const executablePath = process.env.CHROMIUM ?? ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"].find(existsSync);

const median = (list) => list.toSorted((a, b) => a - b)[list.length >> 1];
const quantile = (list, q) => list.toSorted((a, b) => a - b)[Math.floor(q * (list.length - 1))];

/** Does something in a page of a browser of its own; gives what it found, and the largest size of the page's process in MB. */
async function inPage(task, settings) {
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
  try {
    const page = await browser.newPage();
    page.setDefaultTimeout(0);
    if (process.env.VERBOSE) page.on("console", (m) => console.log(`  [page] ${m.text()}`));
    await page.goto(address);
    await page.waitForFunction("globalThis.text !== undefined");
    const found = await page.evaluate(`(${task})(${JSON.stringify(settings)})`);
    const { processInfo } = await (await browser.newBrowserCDPSession()).send("SystemInfo.getProcessInfo");
    const sizes = processInfo.filter((p) => p.type === "renderer").map(({ id }) => {
      const status = readFileSync(`/proc/${id}/status`, "utf8");
      return Number(/VmHWM:\s+(\d+)/.exec(status)?.[1] ?? 0) * 1024e-6;
    });
    return { found, memory: Math.max(...sizes), browser: browser.version() };
  } finally {
    await browser.close();
  }
}

async function decoder({ threads, rows }) {
  const began = performance.now();
  const trainer = await onnxtrain.Trainer.create({
    artifacts: "/made/decoder/", device: "wasm", threads, sizes: { batch_size: 1, sequence_length: rows[0][0].length },
  });
  const ready = (performance.now() - began) / 1000;
  const losses = [];
  const times = [];
  frames.length = 0;
  for (const [ids] of rows) {
    const start = performance.now();
    losses.push((await trainer.step(text.tokenBatch([ids], trainer.inputs))).loss);
    times.push((performance.now() - start) / 1000);
    console.log(`${threads} thread(s): loss ${losses.at(-1)}, ${times.at(-1).toFixed(2)} s`);
  }
  const seen = frames.slice();
  const start = performance.now();
  let tokens = 0;
  for await (const _ of text.generate(trainer, rows[0][0].slice(0, 16), { maxTokens: 4 })) tokens++;
  const token = (performance.now() - start) / 1000 / tokens;
  losses.push((await trainer.step(text.tokenBatch([rows[0][0]], trainer.inputs))).loss); // and training continues
  const plan = onnxtrain.planMemory(trainer.manifest, { batch_size: 1, sequence_length: rows[0][0].length });
  await trainer.dispose();
  return { ready, losses, times, frames: seen, token, plan };
}

async function encoder({ train, test }) {
  const began = performance.now();
  const trainer = await onnxtrain.Trainer.create({ artifacts: "/made/encoder/", device: "wasm", threads: 1 });
  const ready = (performance.now() - began) / 1000;
  let steps = 0;
  for await (const m of trainer.fit(train, { epochs: 8, batchSize: 12, seed: 1, stepsPerCall: 1 })) {
    steps++;
    console.log(`loss ${m.loss}, accuracy ${m.accuracy}`);
  }
  const seconds = (performance.now() - began) / 1000;
  const { accuracy } = await trainer.evaluate(test, { batchSize: 24 });
  await trainer.dispose();
  return { ready, steps, seconds, accuracy };
}

const results = { started: new Date().toISOString(), cores: cpus().length, cpu: cpus()[0].model, load: loadavg()[0] };
if (existsSync(out)) Object.assign(results, { ...JSON.parse(readFileSync(out, "utf8")), ...results });
if (!chosen.length || chosen.includes("decoder")) {
  const { rows, losses: wanted } = JSON.parse(readFileSync(join(work, "decoder.json"), "utf8"));
  results.decoder = [];
  for (const threads of [1, 2]) {
    const { found, memory, browser } = await inPage(decoder, { threads, rows });
    const seconds = median(found.times.slice(Math.min(2, found.times.length - 1)));
    const off = Math.max(...wanted.map((loss, i) => Math.abs(loss - found.losses[i])));
    const row = { threads, seconds, tokens: rows[0][0].length / seconds, memory, off, frame: quantile(found.frames, 0.95), ready: found.ready, token: found.token, planned: found.plan.total / 1e6, losses: found.losses, wanted };
    Object.assign(results, { browser });
    results.decoder.push(row);
    console.log(JSON.stringify(row));
  }
}
if (!chosen.length || chosen.includes("encoder")) {
  const data = JSON.parse(readFileSync(join(work, "encoder.json"), "utf8"));
  const { found, memory, browser } = await inPage(encoder, data);
  Object.assign(results, { browser });
  results.encoder = { ...found, memory, classes: data.classes, examples: data.train.labels.length, tested: data.test.labels.length };
  console.log(JSON.stringify(results.encoder));
}
results.loadAfter = loadavg()[0];
writeFileSync(out, `${JSON.stringify(results, null, 1)}\n`);
server.close();
