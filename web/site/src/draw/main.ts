import { constant, cosine, linear, type Schedule, type Trainer } from "onnxtrain";
import { type Told, training, use } from "./code.js";
import { bytesOf, type Data, type Digits, first, joined, loadDigits, Own, some, VARIANTS } from "./data.js";
import { best, layBars, showBars, showConfusion, showDigits, showGuesses, showTiles } from "./display.js";
import { ask, type Choice, firstLayer, grownNet, openNet } from "./net.js";
import { Pad } from "./pad.js";
import { Chart } from "../shell/chart.js";
import { codePanel } from "../shell/code-panel.js";
import { $, attempt, positive, say, show, text, whole } from "../shell/dom.js";
import { Run } from "../shell/run.js";
import { softmax } from "../shell/softmax.js";
import { calm, onTheme } from "../shell/theme.js";

/** Digits that are shown. */
const SHOWN = 30;
/** How many digits a drawing is mixed with, so that they are not forgotten, and for how long it is learned. */
const REPLAY = 320;
const LESSON = { epochs: 7, batchSize: 32, schedule: cosine(0.006) };
/** What is good for each set of digits. */
const DEFAULTS: Record<string, { batch: number; epochs: number; pace: string }> = {
  digits: { batch: 32, epochs: 10, pace: "16" },
  mnist: { batch: 64, epochs: 5, pace: "0" },
};
const SCHEDULES: Record<string, (lr: number) => Schedule> = { cosine, linear, constant };

let data: Data;
let trainer: Trainer | undefined;
let asking = false;
let stale = false;
const own = new Own();
const pad = new Pad($<HTMLCanvasElement>("pad"), () => void predictDrawing());
const chart = new Chart($("chart"), [{ label: "loss" }, { label: "right about unseen digits", color: "--class-0", share: true, sparse: true }]);
const run = new Run(chart, (running) => {
  for (const id of ["start", "resume", "learn", "forget"]) $<HTMLButtonElement>(id).disabled = running;
});

const choice = (): Choice => ({
  model: text("model"), data: text("data"), size: data.size, device: text("device") as "wasm" | "webgpu", classes: own.names.length,
});
const slot = () => `draw-${text("data")}-${text("model")}`;

/** Returns the settings of a run; the error names the one that cannot be. */
const settings = () => ({
  epochs: whole("epochs"), batchSize: whole("batch"), schedule: SCHEDULES[text("schedule")]!(positive("lr")),
  rows: whole("rows"), tests: whole("tests"), pace: calm() ? undefined : Number(text("pace")) || undefined,
});

async function open(): Promise<Trainer> {
  const old = trainer;
  trainer = undefined;
  await old?.dispose();
  say("Loading ONNX Runtime and the model ...");
  layBars(own.names);
  $("bars").classList.toggle("named", own.names.length > 10);
  return (trainer = await openNet(choice()));
}

const batchOf = (net: Trainer, { image, labels }: Digits) => ({ [net.inputs[0]!]: image, labels });

async function train(net: Trainer, clicked: number): Promise<void> {
  const { rows, tests, ...options } = settings();
  const digits = first(data.train, rows);
  await run.train({
    ...options, trainer: net, test: batchOf(net, first(data.test, tests)), look,
    rows: batchOf(net, own.count ? joined(digits, own.rows()) : digits),
  }, clicked);
}

/** Shows what the net has learned so far. */
async function look(everything: boolean): Promise<void> {
  if (!trainer) return;
  const test = first(data.test, everything ? Math.min(whole("tests"), data.test.labels.length) : SHOWN);
  const guesses = best(await ask(trainer, test.image), own.names.length);
  showGuesses(guesses, test.labels, own.names);
  if (everything) {
    showConfusion(guesses, test.labels, own.names);
    const right = guesses.filter((g, i) => g === test.labels[i]).length;
    show("progress", `So far it reads ${right} of ${guesses.length} digits that it has never seen.`);
  }
  await showLayer();
  await predictDrawing();
}

async function showLayer(): Promise<void> {
  const layer = trainer && (await firstLayer(trainer));
  $("layer").hidden = trainer !== undefined && layer === undefined;
  if (layer) showTiles(layer.tiles, layer.side);
}

async function predictDrawing(): Promise<void> {
  if (pad.empty) {
    showBars();
    return show("verdict", "Draw a digit");
  }
  if (!trainer) return show("verdict", "The net is not there yet ...");
  // What was drawn while the net was asked is asked about afterwards.
  stale = asking;
  if (asking) return;
  asking = true;
  try {
    const probabilities = softmax(await ask(trainer, pad.pixels(data.size)), own.names.length);
    // It may have been cleared meanwhile.
    if (pad.empty) return;
    showBars(probabilities);
    const top = probabilities.indexOf(Math.max(...probabilities));
    const sure = probabilities[top]!;
    show("verdict", `${sure > 0.9 ? "This is" : sure > 0.5 ? "Probably" : "Perhaps"} ${/^\d$/.test(own.names[top]!) ? "a " : ""}${own.names[top]}`);
  } finally {
    asking = false;
    if (stale) void predictDrawing();
  }
}

/** Learns what is on the pad, without forgetting the digits. */
async function learn(clicked: number): Promise<void> {
  const name = text("sign").trim();
  if (pad.empty) throw new Error("draw something first");
  if (!name) throw new Error("say what your drawing is: a digit, or a name of your own");
  if (text("model") !== "mlp") throw new Error("signs of your own are learned by the MLP: choose it in the settings");
  let net = trainer ?? (await open());
  const before = own.names.length;
  const label = own.label(name);
  own.add(label, pad.variants(data.size, VARIANTS));
  own.show(data.size);
  if (own.names.length > before) {
    trainer = await grownNet(net, choice());
    await net.dispose();
    net = trainer;
    layBars(own.names);
    $("bars").classList.add("named");
  }
  const { tests } = settings();
  await run.train({
    ...LESSON, trainer: net, look, done: `It has learned "${name}" from ${VARIANTS} variants of your drawing`,
    rows: batchOf(net, joined(some(data.train, REPLAY), own.rows())), test: batchOf(net, first(data.test, tests)),
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
  own.forget();
  own.show(data.size);
  await train(await open(), clicked);
});
$("clear").onclick = () => pad.clear();
$("save").onclick = () => void attempt(async () => {
  const net = trainer ?? (await open());
  await net.save(slot());
  localStorage.setItem(slot(), own.text());
  say(`Saved at step ${net.globalStep}.`);
});
$("resume").onclick = () => void run.begin(async (clicked) => {
  const kept = localStorage.getItem(slot());
  if (kept === null) throw new Error("nothing was saved for this model and these digits");
  own.read(kept);
  own.show(data.size);
  const net = await open();
  await net.load(slot());
  await train(net, clicked);
});

const told = (): Told => ({
  ...choice(), lr: text("lr"), schedule: text("schedule"), batch: text("batch"), epochs: text("epochs"),
});
let panel: ReturnType<typeof codePanel>;
function showCode(): void {
  const need = async () => trainer ?? (await open());
  panel = codePanel($("code"), {
    note: "The first program trains as this page does; the second one uses the model that you take along.",
    listings: [{ name: "draw.js", text: () => training(told()) }, { name: "use.py", text: () => use(told(), own.names) }],
    products: [
      { name: "model.onnx", about: "the net as it is now, for any runtime", bytes: async () => (await need()).exportModel() },
      { name: "checkpoint.safetensors", about: "to go on training, in Python too", bytes: async () => (await need()).exportCheckpoint() },
      ...["", "-labels"].map((part) => ({ name: `${text("data")}${part}.bin`, bytes: () => bytesOf(`${text("data")}${part}`) })),
    ],
  });
}

/** Takes the digits that are chosen, and shows some. */
async function layOut(): Promise<void> {
  data = await loadDigits(text("data"));
  for (const [id, { labels }] of [["rows", data.train], ["tests", data.test]] as [string, Digits][]) {
    $<HTMLInputElement>(id).max = $<HTMLInputElement>(id).value = String(labels.length);
  }
  for (const [id, value] of Object.entries(DEFAULTS[text("data")]!)) $<HTMLInputElement>(id).value = String(value);
  own.forget();
  own.show(data.size);
  layBars(own.names);
  showDigits(data.test, SHOWN, data.size);
  showConfusion([], new Uint8Array(), own.names);
  showCode();
}

$("data").onchange = () => void attempt(async () => {
  await run.stop();
  const old = trainer;
  trainer = undefined;
  await old?.dispose();
  say("Loading the digits ...");
  await layOut();
  say('Press "Train anew".');
});
$("model").onchange = $("lr").onchange = $("epochs").onchange = $("batch").onchange = $("schedule").onchange = () => panel.refresh();
$("device").onchange = () => {
  if (text("device") === "webgpu" && !("gpu" in navigator)) say("This browser has no WebGPU: training will run on wasm.");
};
onTheme(() => void showLayer());
await attempt(layOut);
if (data!) $("start").click();
