import { constant, cosine, linear, Trainer, type Schedule } from "onnxtrain";
import { first, loadDigits, softmax, type Data, type Digits } from "./digits.js";
import { Pad } from "./pad.js";
import { Chart } from "./chart.js";

const $ = <T extends HTMLElement>(id: string): T => document.getElementById(id) as T;
const text = (id: string): string => $<HTMLInputElement>(id).value;
const number = (id: string): number => Number(text(id));
const say = (message: string): void => void ($("status").textContent = message);
const SHOWN = 30;

let data: Promise<Data> = loadDigits(text("data"));
const chart = new Chart($("chart"));
const pad = new Pad($("pad"), () => void predictDrawing());
let trainer: Trainer | undefined;
let stop: AbortController | undefined;
let goOn: (() => void) | undefined;
let drawingBusy = false;

const saveName = () => `${text("data")}-${text("model")}`;

async function open(): Promise<Trainer> {
  await trainer?.dispose();
  trainer = undefined;
  const device = text("device") as "wasm" | "webgpu";
  say("Loading ONNX Runtime and the model ...");
  trainer = await Trainer.create({
    artifacts: new URL(`./art/${text("model")}-${text("data")}-${device}/`, location.href),
    device,
    onMessage: say,
  });
  return trainer;
}

async function train(resumed: boolean): Promise<void> {
  const { train: all, test } = await data;
  const own = resumed && trainer ? trainer : await open();
  stop = new AbortController();
  busy(true);
  chart.clear();
  const schedules: Record<string, (lr: number) => Schedule> = { cosine, linear, constant };
  const began = performance.now();
  let shown = 0;
  let steps = 0;
  try {
    const options = {
      epochs: number("epochs"), batchSize: number("batch"), validation: test, signal: stop.signal,
      schedule: schedules[text("schedule")]!(number("lr")),
    };
    for await (const m of own.fit(first(all, number("rows")), options)) {
      steps++;
      chart.add(m.step, m.loss, m.validation?.["accuracy"]);
      const now = performance.now();
      if (now - shown > 100 || m.validation) {
        shown = now;
        const speed = (1000 * steps) / (now - began);
        $("loss").textContent = m.loss.toFixed(4);
        $("speed").textContent = speed.toFixed(0);
        $("eta").textContent = `${((m.totalSteps! - steps) / speed).toFixed(0)} s`;
        chart.draw();
      }
      if (m.validation) {
        $("accuracy").textContent = `${(100 * m.validation["accuracy"]!).toFixed(1)} %`;
        say(`Epoch ${m.epoch} of ${options.epochs} on ${own.device}.`);
        await showDigits(test);
        await predictDrawing();
      }
      if (goOn !== undefined) await new Promise<void>((resolve) => (goOn = resolve));
    }
    say(`Done: ${steps} steps in ${((performance.now() - began) / 1000).toFixed(1)} s on ${own.device}.`);
  } catch (error) {
    say(stop.signal.aborted ? "Stopped." : `Failed: ${(error as Error).message}`);
  } finally {
    busy(false);
  }
}

function busy(on: boolean): void {
  goOn = undefined;
  $("pause").textContent = "Pause";
  $<HTMLButtonElement>("start").disabled = on;
  $<HTMLButtonElement>("resume").disabled = on;
  $<HTMLButtonElement>("pause").disabled = $<HTMLButtonElement>("stop").disabled = !on;
}

async function showDigits(test: Digits): Promise<void> {
  if (!trainer) return;
  const { image, labels } = first(test, SHOWN);
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
  if (!trainer || pad.empty || drawingBusy) return;
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

function download(name: string, bytes: Uint8Array): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([bytes as Uint8Array<ArrayBuffer>]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function attempt(work: () => Promise<void>): Promise<void> {
  try {
    await work();
  } catch (error) {
    say(`Failed: ${(error as Error).message}`);
  }
}

$("start").onclick = () => void train(false);
$("stop").onclick = () => {
  stop?.abort();
  goOn?.();
};
$("pause").onclick = () => {
  if (goOn === undefined) {
    goOn = () => undefined;
    $("pause").textContent = "Resume";
    say("Paused.");
  } else {
    const resume = goOn;
    goOn = undefined;
    $("pause").textContent = "Pause";
    resume();
  }
};
$("clear").onclick = () => pad.clear();
$("save").onclick = () => void attempt(async () => {
  await (trainer ?? (await open())).save(saveName());
  say(`Saved at step ${trainer!.globalStep}.`);
});
$("resume").onclick = () => void attempt(async () => {
  const own = await open();
  await own.load(saveName());
  say(`Continues from step ${own.globalStep}.`);
  await train(true);
});
$("model-file").onclick = () => void attempt(async () => download("model.onnx", await (trainer ?? (await open())).exportModel()));
$("checkpoint-file").onclick = () =>
  void attempt(async () => download("checkpoint.safetensors", await (trainer ?? (await open())).exportCheckpoint()));

for (let i = 0; i < 10; i++) {
  const item = document.createElement("li");
  item.innerHTML = `<span>${i}</span><meter min="0" max="1" value="0" aria-label="probability of ${i}"></meter>`;
  $("bars").append(item);
}
/** Shows the first of the unseen digits. */
async function layOut(): Promise<void> {
  const { test, train: all, size } = await data;
  $<HTMLInputElement>("rows").max = $<HTMLInputElement>("rows").value = String(all.labels.length);
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
  await trainer?.dispose();
  trainer = undefined;
  data = loadDigits(text("data"));
  await layOut();
});
await layOut();
