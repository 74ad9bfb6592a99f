import { constant, cosine, linear, ReplayBuffer, type Schedule, type Trainer } from "onnxtrain";
import { type RunSettings, training, inference } from "./code.js";
import { bytesOf, type Data, type Digits, first, concatenated, loadDigits, UserDrawings, VARIANTS } from "./data.js";
import { argmax, createBars, showBars, showConfusion, showDigits, showPredictions, showTiles } from "./display.js";
import { predict, type Choice, weightImages, growNet, openNet } from "./net.js";
import { Pad } from "./pad.js";
import { Chart } from "../shell/chart.js";
import { codePanel } from "../shell/code-panel.js";
import { $, attempt, positive, say, show, text, whole } from "../shell/dom.js";
import { Run } from "../shell/run.js";
import { softmax } from "../shell/softmax.js";
import { reducedMotion, onTheme } from "../shell/theme.js";

/** Number of test digits on the page. */
const SHOWN = 30;
/** Bytes of digits that train again with a new drawing, so that they are not forgotten, and the schedule of that training. */
const REPLAY_BYTES = 8 << 20;
const LESSON = { epochs: 4, batchSize: 32, schedule: cosine(0.006) };
/** Default settings for each dataset. */
const DEFAULTS: Record<string, { batch: number; epochs: number; pace: string }> = {
  digits: { batch: 32, epochs: 10, pace: "16" },
  mnist: { batch: 64, epochs: 5, pace: "0" },
};
const SCHEDULES: Record<string, (lr: number) => Schedule> = { cosine, linear, constant };

let data: Data;
let trainer: Trainer | undefined;
/** The weights before training. */
let initial: Awaited<ReturnType<typeof weightImages>>;
let predicting = false;
let stale = false;
const drawings = new UserDrawings();
const pad = new Pad($<HTMLCanvasElement>("pad"), () => void predictDrawing());
const chart = new Chart($("chart"), [{ label: "loss" }, { label: "test accuracy", color: "--class-0", share: true, sparse: true }]);
const run = new Run(chart, (running) => {
  for (const id of ["start", "resume", "learn", "forget"]) $<HTMLButtonElement>(id).disabled = running;
});

const choice = (): Choice => ({
  model: text("model"), data: text("data"), size: data.size, device: text("device") as "wasm" | "webgpu", classes: drawings.names.length,
});
const slot = () => `draw-${text("data")}-${text("model")}`;

/** Returns the validated settings of a run. */
const settings = () => ({
  epochs: whole("epochs"), batchSize: whole("batch"), schedule: SCHEDULES[text("schedule")]!(positive("lr")),
  rows: whole("rows"), tests: whole("tests"), pace: reducedMotion() ? undefined : Number(text("pace")) || undefined,
});

async function open(): Promise<Trainer> {
  const old = trainer;
  trainer = undefined;
  await old?.dispose();
  say("Loading ONNX Runtime and the model ...");
  createBars(drawings.names);
  $("bars").classList.toggle("named", drawings.names.length > 10);
  trainer = await openNet(choice());
  initial = await weightImages(trainer);
  return trainer;
}

/** Returns a sample of the training digits; "Save" stores it with the weights. */
function replayOf(digits: Digits): ReplayBuffer {
  const buffer = new ReplayBuffer({ maxBytes: REPLAY_BYTES });
  buffer.add({ ...digits }, digits.labels.length);
  return buffer;
}

const batchOf = (net: Trainer, { image, labels }: Digits) => ({ [net.inputs[0]!]: image, labels });

async function train(net: Trainer, clicked: number): Promise<void> {
  const { rows, tests, ...options } = settings();
  const digits = first(data.train, rows);
  net.replay = replayOf(digits);
  await run.train({
    ...options, trainer: net, test: batchOf(net, first(data.test, tests)), update,
    rows: batchOf(net, drawings.count ? concatenated(digits, drawings.rows()) : digits),
  }, clicked);
}

/** Updates the predictions, weights and confusion matrix. */
async function update(everything: boolean): Promise<void> {
  if (!trainer) return;
  const test = first(data.test, everything ? Math.min(whole("tests"), data.test.labels.length) : SHOWN);
  const predictions = argmax(await predict(trainer, test.image), drawings.names.length);
  showPredictions(predictions, test.labels, drawings.names);
  if (everything) {
    showConfusion(predictions, test.labels, drawings.names);
    const right = predictions.filter((g, i) => g === test.labels[i]).length;
    show("progress", `${right} of ${predictions.length} test digits are correct.`);
  }
  await showLayer();
  await predictDrawing();
}

/** Shows how the weights changed: next to the random start, what is learned would be invisible. */
async function showLayer(): Promise<void> {
  const layer = trainer && (await weightImages(trainer));
  $("layer").hidden = trainer !== undefined && layer === undefined;
  if (layer) showTiles(layer.tiles.map((tile, t) => tile.map((w, i) => w - (initial?.tiles[t]?.[i] ?? 0))), layer.side);
}

async function predictDrawing(): Promise<void> {
  if (pad.empty) {
    showBars();
    return show("verdict", "Draw a digit");
  }
  if (!trainer) return show("verdict", "The model is loading ...");
  // If the drawing changes during a prediction, predict again afterwards.
  stale = predicting;
  if (predicting) return;
  predicting = true;
  try {
    const probabilities = softmax(await predict(trainer, pad.pixels(data.size)), drawings.names.length);
    // The pad may have been cleared meanwhile.
    if (pad.empty) return;
    showBars(probabilities);
    const top = probabilities.indexOf(Math.max(...probabilities));
    const confidence = probabilities[top]!;
    show("verdict", `${confidence > 0.9 ? "This is" : confidence > 0.5 ? "Probably" : "Perhaps"} ${/^\d$/.test(drawings.names[top]!) ? "a " : ""}${drawings.names[top]}`);
  } finally {
    predicting = false;
    if (stale) void predictDrawing();
  }
}

/** Trains on the drawing on the pad, mixed with digits. */
async function learn(clicked: number): Promise<void> {
  const name = text("sign").trim();
  if (pad.empty) throw new Error("draw something first");
  if (!name) throw new Error("enter a label for your drawing: a digit or a new name");
  if (text("model") !== "mlp") throw new Error("only the MLP supports new symbols: select it in the settings");
  let net = trainer ?? (await open());
  const before = drawings.names.length;
  const label = drawings.label(name);
  drawings.add(label, pad.variants(data.size, VARIANTS));
  drawings.show(data.size);
  if (drawings.names.length > before) {
    trainer = await growNet(net, choice());
    trainer.replay = net.replay;
    await net.dispose();
    net = trainer;
    createBars(drawings.names);
    $("bars").classList.add("named");
  }
  const { tests } = settings();
  const lesson = drawings.rows();
  const { image, labels } = (net.replay ?? replayOf(data.train)).mix({ ...lesson }, lesson.labels.length);
  await run.train({
    ...LESSON, trainer: net, update, done: `Learned "${name}" from ${VARIANTS} variants of your drawing`,
    rows: batchOf(net, { image: image!.data as Float32Array, labels: labels!.data as Uint8Array }), test: batchOf(net, first(data.test, tests)),
  }, clicked);
  panel.refresh();
}

$("start").onclick = () => void run.begin(async (clicked) => {
  settings();
  await train(await open(), clicked);
});
$("teach").onsubmit = (event) => {
  event.preventDefault();
  void run.begin(learn);
};
$("forget").onclick = () => void run.begin(async (clicked) => {
  drawings.clear();
  drawings.show(data.size);
  await train(await open(), clicked);
});
$("clear").onclick = () => pad.clear();
$("save").onclick = () => void attempt(async () => {
  const net = trainer ?? (await open());
  await net.save(slot());
  localStorage.setItem(slot(), drawings.text());
  say(`Saved at step ${net.globalStep}.`);
});
$("resume").onclick = () => void run.begin(async (clicked) => {
  const saved = localStorage.getItem(slot());
  if (saved === null) throw new Error("nothing was saved for this model and dataset");
  drawings.read(saved);
  drawings.show(data.size);
  const net = await open();
  await net.load(slot());
  await train(net, clicked);
});

const runSettings = (): RunSettings => ({
  ...choice(), lr: text("lr"), schedule: text("schedule"), batch: text("batch"), epochs: text("epochs"),
});
let panel: ReturnType<typeof codePanel>;
function showCode(): void {
  const currentTrainer = async () => trainer ?? (await open());
  panel = codePanel($("code"), {
    note: "The first program trains like this page; the second one runs the exported model.",
    listings: [{ name: "draw.js", text: () => training(runSettings()) }, { name: "inference.py", text: () => inference(runSettings(), drawings.names) }],
    products: [
      { name: "model.onnx", about: "the current model, for any runtime", bytes: async () => (await currentTrainer()).exportModel() },
      { name: "checkpoint.safetensors", about: "to resume training, also in Python", bytes: async () => (await currentTrainer()).exportCheckpoint() },
      ...["", "-labels"].map((part) => ({ name: `${text("data")}${part}.bin`, bytes: () => bytesOf(`${text("data")}${part}`) })),
    ],
  });
}

/** Loads the selected dataset and shows some test digits. */
async function loadDataset(): Promise<void> {
  data = await loadDigits(text("data"));
  for (const [id, { labels }] of [["rows", data.train], ["tests", data.test]] as [string, Digits][]) {
    $<HTMLInputElement>(id).max = $<HTMLInputElement>(id).value = String(labels.length);
  }
  for (const [id, value] of Object.entries(DEFAULTS[text("data")]!)) $<HTMLInputElement>(id).value = String(value);
  drawings.clear();
  drawings.show(data.size);
  createBars(drawings.names);
  showDigits(data.test, SHOWN, data.size);
  showConfusion([], new Uint8Array(), drawings.names);
  showCode();
}

$("data").onchange = () => void attempt(async () => {
  await run.stop();
  const old = trainer;
  trainer = undefined;
  await old?.dispose();
  say("Loading the dataset ...");
  await loadDataset();
  say('Press "Train from scratch".');
});
$("model").onchange = $("lr").onchange = $("epochs").onchange = $("batch").onchange = $("schedule").onchange = () => panel.refresh();
$("device").onchange = () => {
  if (text("device") === "webgpu" && !("gpu" in navigator)) say("This browser does not support WebGPU: training will run on wasm.");
};
onTheme(() => void showLayer());
await attempt(loadDataset);
if (data!) $("start").click();
