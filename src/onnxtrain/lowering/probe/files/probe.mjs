// Run a pack in Node: node probe.mjs DIR onnxjs|onnxruntime-node|onnxruntime-web RESULTS [PROVIDER]
// Loads the runtime's package from the current directory or NODE_PATH. A worker process runs the
// nodes: if a node crashes the runtime, only that node is lost.
import { fork } from "node:child_process";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { counts, probe, summary } from "./runtimes.mjs";

const RUNTIMES = ["onnxjs", "onnxruntime-node", "onnxruntime-web"];
const SECONDS = 60; // per node
const [folder, runtime, output, provider = ""] = process.argv.slice(2);
const require = createRequire(join(process.cwd(), "probe.cjs"));

function fail(message, code) {
  console.error(message);
  process.exit(code);
}

function readPack() {
  const path = join(folder, "pack.json");
  if (!existsSync(path)) fail(`${folder}: not a pack\nhint: onnxtrain probe pack ${folder}`, 4);
  return JSON.parse(readFileSync(path, "utf8"));
}

function versionOf(name) {
  // Search the parent directories: not every package exports its package.json.
  for (let dir = dirname(require.resolve(name)); dir !== dirname(dir); dir = dirname(dir)) {
    const file = join(dir, "package.json");
    if (existsSync(file)) {
      const manifest = JSON.parse(readFileSync(file, "utf8"));
      if (manifest.name === name) return manifest.version;
    }
  }
  return "";
}

function runWorker() {
  const nodes = new Map(readPack().nodes.map((n) => [n.id, n]));
  if (runtime === "onnxjs") delete globalThis.fetch; // onnxjs would fetch local paths over the network
  const library = require(runtime);
  process.on("message", async (id) => {
    const node = nodes.get(id);
    const bytes = new Uint8Array(readFileSync(join(folder, node.file)));
    process.send(await probe(runtime, library, bytes, node, provider));
  });
  process.send("ready");
}

function start() {
  const script = fileURLToPath(import.meta.url);
  const child = fork(script, process.argv.slice(2), {
    env: { ...process.env, ONNXTRAIN_PROBE_WORKER: "1" },
    stdio: ["ignore", "ignore", "ignore", "ipc"],
  });
  return { child, ready: reply(child) };
}

function reply(child) {
  return new Promise((resolve) => {
    const stop = (result) => {
      clearTimeout(timer);
      child.off("message", stop);
      child.off("exit", ended);
      resolve(result);
    };
    const ended = (code, signal) => stop({ status: "crashed", message: `exit ${signal ?? code}` });
    const timer = setTimeout(() => {
      child.kill("SIGKILL");
      stop({ status: "crashed", message: `no answer in ${SECONDS} s` });
    }, SECONDS * 1000);
    child.on("message", stop);
    child.on("exit", ended);
  });
}

async function main() {
  if (!folder || !RUNTIMES.includes(runtime) || !output) {
    fail(`usage: node probe.mjs DIR ${RUNTIMES.join("|")} RESULTS [PROVIDER]`, 2);
  }
  const pack = readPack();
  try {
    require.resolve(runtime);
  } catch {
    fail(`${runtime} is not installed here\nhint: npm install ${runtime}`, 3);
  }
  const answers = {};
  let worker = null;
  for (const node of pack.nodes) {
    if (!worker) {
      worker = start();
      const hello = await worker.ready;
      if (hello !== "ready") fail(`cannot start ${runtime}: ${hello.message}`, 4);
    }
    const result = reply(worker.child); // listens before the request is sent
    worker.child.send(node.id);
    answers[node.id] = await result;
    if (answers[node.id].status === "crashed") worker = null;
  }
  worker?.child.kill();
  const report = summary(pack, runtime, versionOf(runtime), provider, answers);
  writeFileSync(output, JSON.stringify(report, null, 1));
  console.log(`${runtime} ${report.version} ${provider}: ${counts(report.results)}`);
}

if (process.env.ONNXTRAIN_PROBE_WORKER) runWorker();
else await main();
