import { Artifacts, constant, cosine, linear, type Schedule, type Trainer } from "onnxtrain";
import { inPage, inPython, type Told } from "./code.js";
import { rowsOf, type Table } from "./columns.js";
import { readTable, TABLES } from "./tables.js";
import { batchSpecs, explained, likelyTarget, open, rowCount, type Task, taskFor, taskWithHead } from "./task.js";
import { Chart } from "../shell/chart.js";
import { codePanel } from "../shell/code-panel.js";
import { $, attempt, make, positive, say, show, siteFile, text, whole } from "../shell/dom.js";
import { Run } from "../shell/run.js";

/** What the model says about rows that it was not trained on. */

const SHOWN = 12;

/** Shows rows with what they are and what the model says. */
export async function showAnswers(trainer: Trainer, task: Task): Promise<void> {
  const specs = batchSpecs(task.artifacts);
  const count = Math.min(SHOWN, rowCount(task.test));
  const rows = rowsOf(task.test, 0, count);
  const inputs = specs.filter((t) => t.role === "input").map((t) => [t.name, rows[t.name]!] as const);
  const target = specs.find((t) => t.role === "target");
  const output = Object.values(await trainer.predict(Object.fromEntries(inputs)))[0];
  if (!output || !target || output.dims[0] !== count) return;
  const width = output.data.length / count;
  const words = task.fitted.words.get(target.name);
  const whole = /int/.test(target.dtype) && rows[target.name]!.data.length === count;
  const lines = Array.from({ length: count }, (_, r) => {
    const values = Array.from(output.data.subarray(r * width, (r + 1) * width), Number);
    const is = Number(rows[target.name]!.data[r * (rows[target.name]!.data.length / count)]);
    const says = whole ? values.indexOf(Math.max(...values)) : values[0]!;
    const name = (v: number) => (whole ? (words?.[v] ?? String(v)) : v.toPrecision(4));
    return make("tr", { className: whole ? (is === says ? "right" : "wrong") : "" },
      make("td", {}, String(r + 1)), make("td", {}, name(is)), make("td", {}, `${name(says)}${whole ? (is === says ? " ✓" : " ✗") : ""}`));
  });
  $("answers").hidden = false;
  $("answer-rows").replaceChildren(...lines);
}

/** Files that a person drops or chooses. */

/** Returns all files of what was dropped, those of folders too. */
export async function dropped(transfer: DataTransfer): Promise<File[]> {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry()).filter((entry) => entry !== null);
  const read = async (entry: FileSystemEntry): Promise<File[]> => {
    if (entry.isFile) return [await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject))];
    const reader = (entry as FileSystemDirectoryEntry).createReader();
    const inner: FileSystemEntry[] = [];
    // Browsers give a hundred at a time.
    for (;;) {
      const some = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject));
      if (!some.length) break;
      inner.push(...some);
    }
    return (await Promise.all(inner.map(read))).flat();
  };
  return (await Promise.all(entries.map(read))).flat();
}

/** Makes an element a place to drop files on. */
export function dropZone(zone: HTMLElement, got: (files: Promise<File[]>) => void): void {
  zone.ondragover = (event) => {
    event.preventDefault();
    zone.classList.add("over");
  };
  zone.ondragleave = () => zone.classList.remove("over");
  zone.ondrop = (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    got(dropped(event.dataTransfer!));
  };
}

/** Steps that a first run has, about. */
const STEPS = 400;
const SCHEDULES: Record<string, (lr: number) => Schedule> = { cosine, linear, constant };

let artifacts: Artifacts | undefined;
let table: Table | undefined;
let task: Task | undefined;
let trainer: Trainer | undefined;
const chart = new Chart($("chart"), [{ label: "loss" }, { label: "right about unseen rows", color: "--class-0", share: true, sparse: true }]);
const run = new Run(chart, enable);

/** Enables what makes sense now. */
function enable(running = false): void {
  for (const id of ["start", "resume", "save"]) $<HTMLButtonElement>(id).disabled = running || !task;
}

const settings = () => ({ epochs: whole("epochs"), batchSize: whole("batch"), schedule: SCHEDULES[text("schedule")]!(positive("lr")) });

function state(words: string, failed = false): void {
  $("own-state").classList.toggle("failed", failed);
  show("own-state", words);
}

/** Says what was given, and gets ready to train it. */
function ready(next: Task, about: string): void {
  task = next;
  const rows = rowCount(task.train) + rowCount(task.test);
  const words = [...task.fitted.words].map(([name, of]) => `'${name}' was text: ${of.slice(0, 8).map((w, i) => `${w} is ${i}`).join(", ")}${of.length > 8 ? ", ..." : ""}.`);
  state(`${rows} rows from ${task.file}; one in five is kept to test with. ${task.made ? about : [about, ...words].join(" ")} Press "Train my model".`);
  $<HTMLInputElement>("lr").value = String(task.made ? 0.01 : task.artifacts.manifest.optimizer.lr);
  $<HTMLInputElement>("epochs").value = String(Math.min(200, Math.max(3, Math.round((STEPS * whole("batch")) / rowCount(task.train)))));
  show("unseen", task.artifacts.manifest.models.some((m) => m.outputs.some((o) => o.name === "accuracy")) ? "right about unseen rows" : "on unseen rows");
  $("answers").hidden = true;
  say("Ready.");
}

/** Tries what there is: a model and a table, or a table alone. */
async function fit(): Promise<void> {
  task = undefined;
  const alone = table !== undefined && artifacts === undefined;
  $("making").hidden = !alone || table!.kind !== "columns";
  if (artifacts && table) return ready(taskFor(artifacts, table), "");
  if (alone) {
    const made = await taskWithHead(table!, text("target"), sizes());
    return ready(made, made.about);
  }
  const inputs = batchSpecs(artifacts!).map((t) => `${t.name} (${t.dtype}[${t.shape.join(", ")}])`);
  const numbers = artifacts!.manifest.parameters.map((p) => p.shape.reduce((a, b) => a * b, 1)).reduce((a, b) => a + b, 0);
  state(`A model with ${numbers.toLocaleString("en")} weights. It takes ${inputs.join(" and ")}. Now give it a table: a CSV or JSONL with these columns, or an NPZ with these arrays.`);
}

function sizes(): number[] {
  const parts = text("hidden").split(/[\s,]+/).filter(Boolean).map(Number);
  if (parts.some((n) => !Number.isSafeInteger(n) || n < 1)) throw new Error(`Hidden layers is ${text("hidden")}, expected sizes such as 64, 32`);
  return parts;
}

async function take(files: readonly File[]): Promise<void> {
  const tables = files.filter((f) => TABLES.test(f.name));
  const model = files.filter((f) => !tables.includes(f));
  if (model.length) {
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

/** Takes files, and says what is wrong with them where something is. */
function got(work: () => Promise<void>): void {
  void attempt(async () => {
    // What was given before is no longer what is meant.
    task = undefined;
    enable();
    await run.stop();
    try {
      await close();
      await work();
    } catch (error) {
      task = undefined;
      state((error as Error).message, true);
      throw error;
    } finally {
      enable();
      panel.refresh();
    }
  });
}

/** Closes the trainer, whose weights are of what was given before. */
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
  const look = async (epochEnds: boolean) => {
    if (epochEnds) await showAnswers(net, of);
  };
  try {
    await run.train({ ...settings(), trainer: net, rows: of.train, test: of.test, look }, clicked);
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
for (const id of ["own-model", "own-data"]) {
  const input = $<HTMLInputElement>(id);
  input.onchange = () => got(() => take([...(input.files ?? [])]));
}
dropZone($("own-zone"), (files) => got(async () => take(await files)));
$("target").onchange = $("hidden").onchange = () => got(fit);
$("example").onclick = () => got(async () => {
  artifacts = undefined;
  const response = await fetch(siteFile("data/iris.csv"));
  if (!response.ok) throw new Error(`iris.csv: HTTP ${response.status}`);
  await take([new File([await response.blob()], "iris.csv")]);
});

const told = (): Told => ({ task, lr: text("lr"), schedule: text("schedule"), batch: text("batch"), epochs: text("epochs") });
const need = async (): Promise<Trainer> => {
  if (!task) throw new Error("give a model and data first");
  return trainer ?? (await openTask(task));
};
const panel = codePanel($("code"), {
  note: "art/ is the folder that onnxtrain build wrote, or the files that createHead gives.",
  listings: [{ name: "train.js", text: () => inPage(told()) }, { name: "train.py", text: () => inPython(told()) }],
  products: [
    { name: "model.onnx", about: "your model as it is now", bytes: async () => (await need()).exportModel() },
    { name: "checkpoint.safetensors", about: "to go on training elsewhere, in Python too", bytes: async () => (await need()).exportCheckpoint() },
  ],
});
for (const id of ["lr", "schedule", "batch", "epochs"]) $(id).onchange = () => panel.refresh();
