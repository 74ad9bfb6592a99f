// The page: joins a federation, and shows its rounds.
import { Trainer } from "onnxtrain";
import { FlowerNode } from "onnxtrain/flower";
import { columns } from "./columns.mjs";

const $ = (id) => document.getElementById(id);
const say = (text) => (console.log(text), ($("status").textContent = text));
const options = new URLSearchParams(location.search);

try {
  const dataset = columns(await (await fetch(`/data/${options.get("data") ?? "tab.json"}`)).json());
  const trainer = await Trainer.create({ artifacts: "/artifacts/", device: "wasm" });
  globalThis.node = new FlowerNode(location.origin, {
    trainer,
    dataset,
    pauseWhenHidden: options.has("pause"),
    heartbeat: Number(options.get("heartbeat") ?? 120),
    onMessage: say,
    onRound: ({ type, round, metrics }) => say(`${type}, round ${round}: loss ${metrics.loss.toFixed(4)}`),
  });
  await globalThis.node.join();
} catch (error) {
  say(`${error.name}: ${error.message}`);
}

/** Shows the log of rounds, if the server provides one. */
async function show() {
  const response = await fetch("/rounds/rounds.jsonl", { cache: "no-store" }).catch(() => undefined);
  if (!response?.ok) return;
  const lines = (await response.text()).split("\n").filter(Boolean).map((line) => JSON.parse(line));
  const trained = lines.filter((line) => line.kind === "train");
  const losses = trained.map((line) => line.metrics.loss).filter(Number.isFinite);
  const top = Math.max(...losses, 1e-9);
  const at = (loss, i) => `${(100 * (i + 0.5)) / losses.length},${100 - (95 * loss) / top}`;
  $("curve").firstElementChild.setAttribute("points", losses.map(at).join(" "));
  if (losses.length) {
    $("ends").textContent = `${losses[0].toFixed(4)} in round 1, ${losses.at(-1).toFixed(4)} in round ${losses.length}`;
  }
  const nodes = new Map();
  for (const line of trained) {
    for (const [id, examples] of Object.entries(line.nodes)) nodes.set(id, { rounds: (nodes.get(id)?.rounds ?? 0) + 1, examples });
  }
  const own = String(globalThis.node?.id);
  const known = await fetch("/rounds/names.json").catch(() => undefined);
  const names = known?.ok ? await known.json() : {};
  $("nodes").replaceChildren(...[...nodes].map(([id, { rounds, examples }]) => {
    const row = document.createElement("tr");
    for (const text of [id, names[id] ?? "", rounds, examples, id === own ? "this tab" : ""]) row.insertCell().textContent = text;
    return row;
  }));
}
setInterval(() => void show(), 2000);
