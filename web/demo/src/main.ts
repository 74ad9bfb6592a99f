import { constant, cosine, linear, Trainer, type Dataset, type Schedule } from "onnxtrain";
import { Chart } from "./chart.js";
import { first, loadDigits, softmax, type Data, type Digits } from "./digits.js";
import { ownPanel, ownRun } from "./own.js";
import { Pad } from "./pad.js";
import { $, attempt, download, number, say, show, text } from "./ui.js";

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
/** Whether the trainer knows digits, or is of somebody's own model. */
let digits = false;
let stop: AbortController | undefined;
let goOn: (() => void) | undefined;
let drawingBusy = false;

const saveName = () => `${text("data")}-${text("model")}`;
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
  digits = true;
  trainer = early?.choice === choice() && found ? found : await create();
  return trainer;
}

/** Trains on rows; `clicked` is when the person asked for it. */
async function train(own: Trainer, rows: Dataset, test: Dataset, clicked: number): Promise<void> {
  const { signal } = (stop = new AbortController());
  busy(true);
  chart.clear();
  show("accuracy", "-");
  const schedules: Record<string, (lr: number) => Schedule> = { cosine, linear, constant };
  const epochs = number("epochs");
  const options = {
    epochs, batchSize: number("batch"), validation: test, signal,
    schedule: schedules[text("schedule")]!(number("lr")),
  };
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
        say(`Epoch ${m.epoch} of ${epochs} on ${own.device}.`);
      }
      if (digits && (now - asked > LIVE || m.validation)) {
        await showDigits();
        await predictDrawing();
        asked = performance.now();
      }
      if (goOn !== undefined) {
        const paused = performance.now();
        say("Paused.");
        await new Promise<void>((resolve) => (goOn = resolve));
        began += performance.now() - paused;
      }
    }
    say(`Done: ${steps} steps in ${((performance.now() - began) / 1000).toFixed(1)} s on ${own.device}.`);
  } catch (error) {
    say(signal.aborted ? "Stopped." : `Failed: ${(error as Error).message}`);
  } finally {
    busy(false);
  }
}

async function trainDigits(own: Trainer, clicked: number): Promise<void> {
  const { train: all, test } = await data;
  await train(own, first(all, number("rows")), first(test, number("tests")), clicked);
}

function busy(on: boolean): void {
  goOn = undefined;
  show("pause", "Pause");
  for (const id of ["start", "resume"]) $<HTMLButtonElement>(id).disabled = on;
  for (const id of ["pause", "stop"]) $<HTMLButtonElement>(id).disabled = !on;
  $<HTMLButtonElement>("own-start").disabled = on || !ownRun(device);
}

async function showDigits(): Promise<void> {
  if (!trainer) return;
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

async function predictDrawing(): Promise<void> {
  if (!trainer || !digits || pad.empty || drawingBusy) return;
  drawingBusy = true;
  try {
    const { logits } = await trainer.predict({ image: pad.pixels((await data).size) });
    softmax(logits!.data as Float32Array).forEach((p, i) => {
      $("bars").children[i]!.querySelector("meter")!.value = p;
    });
  } finally {
    drawingBusy = false;
  }
}

$("start").onclick = () => {
  const clicked = performance.now();
  busy(true);
  void attempt(async () => await trainDigits(await open(), clicked)).finally(() => busy(false));
};
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
$("resume").onclick = () => void attempt(async () => {
  const clicked = performance.now();
  const own = await open();
  await own.load(saveName());
  say(`Continues from step ${own.globalStep}.`);
  await trainDigits(own, clicked);
});
$("own-start").onclick = () => void attempt(async () => {
  const clicked = performance.now();
  const run = ownRun(device)!;
  await close();
  digits = false;
  say("Loading ONNX Runtime and your model ...");
  trainer = await run.open();
  await train(trainer, run.train, run.test, clicked);
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
