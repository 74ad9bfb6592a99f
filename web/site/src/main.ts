import { constant, cosine, linear, Trainer, type Dataset, type Schedule } from "onnxtrain";
import { Chart } from "./chart.js";
import { first, loadDigits, softmax, type Data, type Digits } from "./digits.js";
import { ownPanel, ownRun, type Own } from "./own.js";
import { Pad } from "./pad.js";
import { $, attempt, download, positive, say, show, text, whole } from "./ui.js";

/** Digits that are shown, and how often they are asked about while training runs, in ms. */
const SHOWN = 30;
const LIVE = 400;
/** What is good for each set of digits. */
const DEFAULTS: Record<string, { batch: number; epochs: number }> = {
  digits: { batch: 32, epochs: 10 },
  mnist: { batch: 64, epochs: 5 },
};

let data: Promise<Data> = loadDigits(text("data"));
const chart = new Chart($("chart"));
const pad = new Pad($("pad"), () => void predictDrawing());
let trainer: Trainer | undefined;
/** Somebody's own model, where the trainer is of that and does not know digits. */
let mine: Own | undefined;
let stop: AbortController | undefined;
let goOn: (() => void) | undefined;
let drawingBusy = false;

const saveName = () => mine?.name ?? `${text("data")}-${text("model")}`;
const device = () => text("device") as "wasm" | "webgpu";

async function close(): Promise<void> {
  const old = trainer;
  trainer = undefined;
  await old?.dispose();
}

/** A trainer made before anybody asked, so that training starts at once. */
let prepared: { readonly choice: string; readonly trainer: Promise<Trainer | undefined> } | undefined;
const choice = () => [text("model"), text("data"), device()].join();
const create = () =>
  Trainer.create({ artifacts: new URL(`./art/${text("model")}-${text("data")}/`, location.href), device: device(), onMessage: say });

function prepare(): void {
  const old = prepared;
  // What goes wrong here is said when training is asked for.
  prepared = { choice: choice(), trainer: create().catch(() => undefined) };
  void old?.trainer.then((t) => t?.dispose());
}

async function open(): Promise<Trainer> {
  await close();
  say("Loading ONNX Runtime and the model ...");
  const early = prepared;
  prepared = undefined;
  const found = await early?.trainer;
  if (early && early.choice !== choice()) await found?.dispose();
  mine = undefined;
  trainer = early?.choice === choice() && found ? found : await create();
  return trainer;
}

/** Gives the settings of a run; the error names the one that cannot be. */
function settings() {
  const schedules: Record<string, (lr: number) => Schedule> = { cosine, linear, constant };
  return { epochs: whole("epochs"), batchSize: whole("batch"), schedule: schedules[text("schedule")]!(positive("lr")) };
}

/** Trains on rows; `clicked` is when the person asked for it. */
async function train(own: Trainer, rows: Dataset, test: Dataset, clicked: number): Promise<void> {
  const { signal } = stop!;
  const options = { ...settings(), validation: test, signal };
  chart.clear();
  for (const id of ["loss", "accuracy", "speed", "eta", "first"]) show(id, "-");
  show("unseen", mine ? "accuracy on unseen rows" : "accuracy on unseen digits");
  const before = own.globalStep;
  const tell = (epoch: number) => say(`Epoch ${epoch} of ${options.epochs} on ${own.device}${before ? `, from step ${before}` : ""}.`);
  let told = 1;
  tell(told);
  let began = performance.now();
  let shown = 0;
  let asked = 0;
  let steps = 0;
  try {
    for await (const m of own.fit(rows, options)) {
      const now = performance.now();
      if (++steps === 1) show("first", `${((now - clicked) / 1000).toFixed(2)} s`);
      const accuracy = m.validation?.["accuracy"];
      chart.add(m.step, m.loss, accuracy);
      if (now - shown > 100 || m.validation) {
        shown = now;
        const speed = (1000 * steps) / (now - began);
        show("loss", m.loss.toFixed(4));
        show("speed", speed.toFixed(0));
        show("eta", `${((m.totalSteps! - steps) / speed).toFixed(0)} s`);
        chart.draw();
      }
      if (m.validation) {
        show("accuracy", accuracy === undefined ? `loss ${m.validation.loss.toFixed(4)}` : `${(100 * accuracy).toFixed(1)} %`);
      }
      if (m.epoch !== told) tell((told = m.epoch));
      if (!mine && (now - asked > LIVE || m.validation)) {
        await showDigits();
        await predictDrawing();
        asked = performance.now();
      }
      if (goOn !== undefined) {
        const paused = performance.now();
        say("Paused.");
        await new Promise<void>((resolve) => (goOn = resolve));
        began += performance.now() - paused;
        if (!signal.aborted) tell(told);
      }
    }
    say(`Done: ${steps} steps in ${((performance.now() - began) / 1000).toFixed(1)} s on ${own.device}.`);
  } catch (error) {
    if (!signal.aborted) throw mine?.explain(error as Error) ?? error;
    say("Stopped.");
  }
}

async function trainDigits(own: Trainer, clicked: number): Promise<void> {
  const { train: all, test } = await data;
  await train(own, first(all, whole("rows")), first(test, whole("tests")), clicked);
}

function busy(on: boolean): void {
  goOn = undefined;
  show("pause", "Pause");
  for (const id of ["start", "resume"]) $<HTMLButtonElement>(id).disabled = on;
  for (const id of ["pause", "stop"]) $<HTMLButtonElement>(id).disabled = !on;
  $<HTMLButtonElement>("own-start").disabled = on || !ownRun(device);
}

async function showDigits(): Promise<void> {
  if (!trainer || mine) return;
  const { image, labels } = first((await data).test, SHOWN);
  const { logits } = await trainer.predict({ image });
  const figures = $("grid").children;
  for (let i = 0; i < SHOWN; i++) {
    const row = (logits!.data as Float32Array).subarray(10 * i, 10 * i + 10);
    const guess = row.indexOf(Math.max(...row));
    const figure = figures[i] as HTMLElement;
    figure.className = guess === labels[i] ? "right" : "wrong";
    figure.lastElementChild!.textContent = guess === labels[i] ? `${guess} ✓` : `${guess} ✗`;
  }
}

function showBars(probabilities?: Float32Array): void {
  document.querySelectorAll<HTMLMeterElement>("#bars meter").forEach((bar, i) => (bar.value = probabilities?.[i] ?? 0));
}

async function predictDrawing(): Promise<void> {
  if (pad.empty) return showBars();
  if (!trainer || mine || drawingBusy) return;
  drawingBusy = true;
  try {
    const { logits } = await trainer.predict({ image: pad.pixels((await data).size) });
    // It may have been cleared meanwhile.
    showBars(pad.empty ? undefined : softmax(logits!.data as Float32Array));
  } finally {
    drawingBusy = false;
  }
}

/** Trains as a button asks for, if the settings can be; Pause and Stop count from here on. */
function begin(work: (clicked: number) => Promise<void>): void {
  const clicked = performance.now();
  stop = new AbortController();
  busy(true);
  void attempt(async () => {
    settings();
    await work(clicked);
  }).finally(() => busy(false));
}

async function openMine(own: Own): Promise<Trainer> {
  await close();
  mine = own;
  say("Loading ONNX Runtime and your model ...");
  return (trainer = await own.open());
}

$("start").onclick = () => begin(async (clicked) => await trainDigits(await open(), clicked));
$("stop").onclick = () => {
  stop?.abort();
  goOn?.();
};
$("pause").onclick = () => {
  if (goOn === undefined) {
    goOn = () => undefined;
    show("pause", "Resume");
  } else {
    const resume = goOn;
    goOn = undefined;
    show("pause", "Pause");
    resume();
  }
};
$("clear").onclick = () => pad.clear();
$("save").onclick = () => void attempt(async () => {
  await (trainer ?? (await open())).save(saveName());
  say(`Saved at step ${trainer!.globalStep}.`);
});
$("resume").onclick = () => begin(async (clicked) => {
  const run = mine;
  const own = run ? await openMine(run) : await open();
  await own.load(saveName());
  await (run ? train(own, run.train, run.test, clicked) : trainDigits(own, clicked));
});
$("own-start").onclick = () => begin(async (clicked) => {
  const run = ownRun(device)!;
  await train(await openMine(run), run.train, run.test, clicked);
});
$("model-file").onclick = () => void attempt(async () => download("model.onnx", await (trainer ?? (await open())).exportModel()));
$("checkpoint-file").onclick = () =>
  void attempt(async () => download("checkpoint.safetensors", await (trainer ?? (await open())).exportCheckpoint()));
ownPanel(() => busy(false));

for (let i = 0; i < 10; i++) {
  const item = document.createElement("li");
  item.innerHTML = `<span>${i}</span><meter min="0" max="1" value="0" aria-label="probability of ${i}"></meter>`;
  $("bars").append(item);
}

/** Shows the first of the unseen digits. */
async function layOut(): Promise<void> {
  const { test, train: all, size } = await data;
  for (const [id, { labels }] of [["rows", all], ["tests", test]] as [string, Digits][]) {
    $<HTMLInputElement>(id).max = $<HTMLInputElement>(id).value = String(labels.length);
  }
  for (const [id, value] of Object.entries(DEFAULTS[text("data")]!)) $<HTMLInputElement>(id).value = String(value);
  const figures = Array.from({ length: SHOWN }, (_, i) => {
    const figure = document.createElement("figure");
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = size;
    const pixels = new ImageData(size, size);
    for (let p = 0; p < size ** 2; p++) {
      const v = 255 * test.image[i * size ** 2 + p]!;
      pixels.data.set([v, v, v, 255], 4 * p);
    }
    canvas.getContext("2d")!.putImageData(pixels, 0, 0);
    const caption = document.createElement("figcaption");
    caption.textContent = "?";
    figure.append(canvas, caption);
    return figure;
  });
  $("grid").replaceChildren(...figures);
}

$("data").onchange = () => void attempt(async () => {
  stop?.abort();
  await close();
  data = loadDigits(text("data"));
  await layOut();
  prepare();
});
$("model").onchange = $("device").onchange = prepare;
await layOut();
prepare();
