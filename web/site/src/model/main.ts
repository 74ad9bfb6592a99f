import { Artifacts, constant, cosine, linear, type Schedule, type Trainer } from "onnxtrain";
import { inPage, inPython, type RunSettings } from "./code.js";
import { rowsOf, type Table } from "./columns.js";
import { command, facts, type Loss, LOSSES, type PlainModel, plainModel, suggestLoss } from "./plain.js";
import { readTable, TABLES } from "./tables.js";
import { batchSpecs, explained, likelyTarget, open, rowCount, type Task, taskFor, taskWithHead } from "./task.js";
import { Chart } from "../shell/chart.js";
import { codePanel } from "../shell/code-panel.js";
import { $, attempt, make, positive, say, show, siteFile, text, whole } from "../shell/dom.js";
import { Run } from "../shell/run.js";


const SHOWN = 12;

/** Shows labels and predictions of test rows. */
export async function showPredictions(trainer: Trainer, task: Task): Promise<void> {
  const specs = batchSpecs(task.artifacts);
  const count = Math.min(SHOWN, rowCount(task.test));
  const rows = rowsOf(task.test, 0, count);
  const inputs = specs.filter((t) => t.role === "input").map((t) => [t.name, rows[t.name]!] as const);
  const target = specs.find((t) => t.role === "target");
  const output = Object.values(await trainer.predict(Object.fromEntries(inputs)))[0];
  if (!output || !target || output.dims[0] !== count) return;
  const width = output.data.length / count;
  const names = task.fitted.labelNames.get(target.name);
  const whole = /int/.test(target.dtype) && rows[target.name]!.data.length === count;
  const lines = Array.from({ length: count }, (_, r) => {
    const values = Array.from(output.data.subarray(r * width, (r + 1) * width), Number);
    const label = Number(rows[target.name]!.data[r * (rows[target.name]!.data.length / count)]);
    const prediction = whole ? values.indexOf(Math.max(...values)) : values[0]!;
    const name = (v: number) => (whole ? (names?.[v] ?? String(v)) : v.toPrecision(4));
    return make("tr", { className: whole ? (label === prediction ? "right" : "wrong") : "" },
      make("td", {}, String(r + 1)), make("td", {}, name(label)), make("td", {}, `${name(prediction)}${whole ? (label === prediction ? " ✓" : " ✗") : ""}`));
  });
  $("answers").hidden = false;
  $("answer-rows").replaceChildren(...lines);
}

/** Returns all dropped files, including those in directories. */
export async function dropped(transfer: DataTransfer): Promise<File[]> {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry()).filter((entry) => entry !== null);
  const read = async (entry: FileSystemEntry): Promise<File[]> => {
    if (entry.isFile) return [await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject))];
    const reader = (entry as FileSystemDirectoryEntry).createReader();
    const inner: FileSystemEntry[] = [];
    // Browsers return at most 100 entries per call.
    for (;;) {
      const some = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
      if (!some.length) break;
      inner.push(...some);
    }
    return (await Promise.all(inner.map(read))).flat();
  };
  return (await Promise.all(entries.map(read))).flat();
}

/** Turns an element into a drop zone. */
export function dropZone(zone: HTMLElement, onDrop: (files: Promise<File[]>) => void): void {
  zone.ondragover = (event) => {
    event.preventDefault();
    zone.classList.add("over");
  };
  zone.ondragleave = () => zone.classList.remove("over");
  zone.ondrop = (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    onDrop(dropped(event.dataTransfer!));
  };
}

/** Approximate number of steps of the default number of epochs. */
const STEPS = 400;
const SCHEDULES: Record<string, (lr: number) => Schedule> = { cosine, linear, constant };

let artifacts: Artifacts | undefined;
/** An .onnx file without loss and optimizer. */
let plain: PlainModel | undefined;
let table: Table | undefined;
let task: Task | undefined;
let trainer: Trainer | undefined;
const chart = new Chart($("chart"), [{ label: "loss" }, { label: "test accuracy", color: "--class-0", share: true, sparse: true }]);
const run = new Run(chart, enable);

/** Enables the buttons that can be used now. */
function enable(running = false): void {
  for (const id of ["start", "resume", "save", "download"]) $<HTMLButtonElement>(id).disabled = running || !task;
}

const settings = () => ({ epochs: whole("epochs"), batchSize: whole("batch"), schedule: SCHEDULES[text("schedule")]!(positive("lr")) });

function state(message: string, failed = false): void {
  $("own-state").classList.toggle("failed", failed);
  show("own-state", message);
}

/** Shows the task and enables training. */
function ready(next: Task, about: string): void {
  task = next;
  const rows = rowCount(task.train) + rowCount(task.test);
  const encodings = [...task.fitted.labelNames].map(([name, of]) => `'${name}' is encoded as ${of.slice(0, 8).map((label, i) => `${label} = ${i}`).join(", ")}${of.length > 8 ? ", ..." : ""}.`);
  state(`${rows} rows from ${task.file}; one in five is held out for testing. ${task.generated ? about : [about, ...encodings].join(" ")} Press "Train my model".`);
  $<HTMLInputElement>("lr").value = String(task.generated ? 0.01 : task.artifacts.manifest.optimizer.lr);
  $<HTMLInputElement>("epochs").value = String(Math.min(200, Math.max(3, Math.round((STEPS * whole("batch")) / rowCount(task.train)))));
  show("test-metric", task.artifacts.manifest.models.some((m) => m.outputs.some((o) => o.name === "accuracy")) ? "test accuracy" : "test loss");
  $("answers").hidden = true;
  say("Ready.");
}

/** Creates a task from a model and a table, or from a table alone. */
async function fit(): Promise<void> {
  task = undefined;
  $("plain").hidden = plain === undefined;
  if (plain) return showPlain(plain);
  const tableOnly = table !== undefined && artifacts === undefined;
  $("making").hidden = !tableOnly || table!.kind !== "columns";
  if (artifacts && table) return ready(taskFor(artifacts, table), "");
  if (tableOnly) {
    const generated = await taskWithHead(table!, text("target"), sizes());
    return ready(generated, generated.about);
  }
  const inputs = batchSpecs(artifacts!).map((t) => `${t.name} (${t.dtype}[${t.shape.join(", ")}])`);
  const count = artifacts!.manifest.parameters.map((p) => p.shape.reduce((a, b) => a * b, 1)).reduce((a, b) => a + b, 0);
  state(`A model with ${count.toLocaleString("en")} parameters and the inputs ${inputs.join(" and ")}. Now add a table: a CSV or JSONL file with these columns, or an NPZ file with these arrays.`);
}

/** Shows what an .onnx file declares, and the command that builds artifacts. */
function showPlain(given: PlainModel): void {
  $("making").hidden = true;
  state(`${given.name} has no loss and no optimizer yet. The command below adds them${table ? `; ${table.name} then trains it` : ""}.`);
  $("plain-facts").replaceChildren(...facts(given).map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value))));
  $("plain-output").replaceChildren(...given.outputs.map((y) => make("option", { value: y.name }, y.name)));
  $("plain-loss").replaceChildren(...LOSSES.map((loss) => make("option", { value: loss }, loss)));
  suggest();
  say("Run the command, then drop the directory art.");
}

/** Selects the likely loss of the selected output. */
function suggest(): void {
  const output = plain!.outputs.find((y) => y.name === text("plain-output"))!;
  const { loss, note } = suggestLoss(plain!.model, output);
  $<HTMLSelectElement>("plain-loss").value = loss;
  show("plain-note", note);
  showCommand();
}

const showCommand = (): void => show("command", command(plain!, text("plain-output"), text("plain-loss") as Loss));

function sizes(): number[] {
  const parts = text("hidden").split(/[\s,]+/).filter(Boolean).map(Number);
  if (parts.some((n) => !Number.isSafeInteger(n) || n < 1)) throw new Error(`Hidden layers must be sizes such as 64, 32, got ${text("hidden")}`);
  return parts;
}

async function loadFiles(files: readonly File[]): Promise<void> {
  const tables = files.filter((f) => TABLES.test(f.name));
  const model = files.filter((f) => !tables.includes(f));
  const [onnx] = model.filter((f) => /\.onnx$/i.test(f.name));
  if (onnx && !model.some((f) => f.name.endsWith("manifest.json"))) {
    artifacts = undefined;
    plain = plainModel(onnx.name, new Uint8Array(await onnx.arrayBuffer()));
  } else if (model.length) {
    plain = undefined;
    artifacts = await Artifacts.load(model);
    table = undefined;
  }
  if (tables[0]) {
    table = undefined;
    table = await readTable(tables[0]);
    if (table.kind === "columns") {
      $("target").replaceChildren(...[...table.columns.keys()].map((n) => make("option", { value: n }, n)));
      $<HTMLSelectElement>("target").value = likelyTarget(table);
    }
  }
  if (model.length || tables.length) await fit();
}

/** Replaces the task by the result of `work` and shows errors. */
function replaceTask(work: () => Promise<void>): void {
  void attempt(async () => {
    // The previous task is no longer valid.
    task = undefined;
    enable();
    await run.stop();
    try {
      await close();
      await work();
    } catch (error) {
      task = undefined;
      $("plain").hidden = true;
      state((error as Error).message, true);
      throw error;
    } finally {
      enable();
      panel.refresh();
    }
  });
}

/** Disposes the trainer of the previous task. */
async function close(): Promise<void> {
  const old = trainer;
  trainer = undefined;
  await old?.dispose();
}

async function openTask(of: Task): Promise<Trainer> {
  await close();
  say("Loading ONNX Runtime and your model ...");
  return (trainer = await open(of, text("device") as "wasm" | "webgpu", say));
}

async function train(of: Task, net: Trainer, clicked: number): Promise<void> {
  const onProgress = async (epochEnds: boolean) => {
    if (epochEnds) await showPredictions(net, of);
  };
  try {
    await run.train({ ...settings(), trainer: net, rows: of.train, test: of.test, update: onProgress }, clicked);
  } catch (error) {
    throw explained(error as Error, of);
  }
}

$("start").onclick = () => void run.begin(async (clicked) => {
  settings();
  await train(task!, await openTask(task!), clicked);
});
$("save").onclick = () => void attempt(async () => {
  const { slot } = task!;
  const net = trainer ?? (await openTask(task!));
  await net.save(slot);
  say(`Saved at step ${net.globalStep}.`);
});
$("resume").onclick = () => void run.begin(async (clicked) => {
  const of = task!;
  const net = await openTask(of);
  await net.load(of.slot);
  await train(of, net, clicked);
});
$("plain-output").onchange = suggest;
$("plain-loss").onchange = showCommand;
$("copy-command").onclick = () => void attempt(async () => {
  await navigator.clipboard.writeText($("command").textContent!);
  show("copied", "Copied.");
  setTimeout(() => show("copied", ""), 2000);
});
for (const id of ["own-model", "own-onnx", "own-data"]) {
  const input = $<HTMLInputElement>(id);
  input.onchange = () => replaceTask(() => loadFiles([...(input.files ?? [])]));
}
dropZone($("own-zone"), (files) => replaceTask(async () => loadFiles(await files)));
$("target").onchange = $("hidden").onchange = () => replaceTask(fit);
$("example").onclick = () => replaceTask(async () => {
  artifacts = plain = undefined;
  const response = await fetch(siteFile("data/iris.csv"));
  if (!response.ok) throw new Error(`iris.csv: HTTP ${response.status}`);
  await loadFiles([new File([await response.blob()], "iris.csv")]);
});

const runSettings = (): RunSettings => ({ task, lr: text("lr"), schedule: text("schedule"), batch: text("batch"), epochs: text("epochs") });
const currentTrainer = async (): Promise<Trainer> => {
  if (!task) throw new Error("add a model and data first");
  return trainer ?? (await openTask(task));
};
const panel = codePanel($("code"), {
  note: "art/ is the directory written by onnxtrain build, or the files returned by createHead.",
  listings: [{ name: "train.js", text: () => inPage(runSettings()) }, { name: "train.py", text: () => inPython(runSettings()) }],
  products: [
    { name: "model.onnx", about: "your model with the current weights", bytes: async () => (await currentTrainer()).exportModel() },
    { name: "checkpoint.safetensors", about: "to resume training, also in Python", bytes: async () => (await currentTrainer()).exportCheckpoint() },
  ],
});
for (const id of ["lr", "schedule", "batch", "epochs"]) $(id).onchange = () => panel.refresh();
