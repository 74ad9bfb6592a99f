import { createHead, Trainer } from "onnxtrain";
import { Backbone, composeModels, SIZE, crop } from "./backbone.js";
import { type Class, ClassList, eachFile } from "./classes.js";
import { training, inference } from "./code.js";
import { draw, DRAWINGS } from "./example.js";
import { Listener } from "./sound.js";
import { openCamera } from "../runner/camera.js";
import { Chart } from "../shell/chart.js";
import { codePanel } from "../shell/code-panel.js";
import { $, attempt, fail, make, say, show } from "../shell/dom.js";
import { softmax } from "../shell/softmax.js";

type Source = "camera" | "microphone" | "images";
const EPOCHS = 40;
/** Interval between recorded examples, by source, and between predictions, in ms. */
const RECORD: Record<Source, number> = { camera: 120, microphone: 200, images: 0 };
const PREDICT = 120;
/** Number of generated examples per class; with ten, one star in six was classified as a ball. */
const DRAWN = 24;
const NOTES: Record<Source, string> = {
  camera: "Hold a button while the camera shows an object, from all sides. Record about twenty examples per class.",
  microphone: "Hold a button during the sound. Use silence as the first class, so that there is a prediction for it.",
  images: "Select images for each class; only the central square is used. Start with eight images per class.",
};

const video = $<HTMLVideoElement>("camera");
const chart = new Chart($("chart"), [{ label: "loss" }], { height: 130 });
const backbone = Backbone.open();
let source: Source = "images";
let close: (() => void) | undefined;
let listener: Listener | undefined;
let trainer: Trainer | undefined;
/** The trained classes, in the order of the logits. */
let learned: readonly Class[] = [];
let width = 528;

const list = new ClassList($("classes"), {
  record: (into) => {
    const timer = setInterval(() => void attempt(() => addExample(into, now())), RECORD[source]);
    return () => clearInterval(timer);
  },
  files: async (into, files) => {
    say(await eachFile(files, into.name, async (file) => await addExample(into, await fromFile(file))));
  },
  changed: () => {
    $<HTMLButtonElement>("learn").disabled = missingExamples() !== undefined;
    panel?.refresh();
  },
});

/** Returns why training cannot start yet, or `undefined`. */
function missingExamples(): string | undefined {
  if (list.classes.length < 2) return "add at least two classes";
  const empty = list.classes.find((c) => c.examples.length === 0);
  return empty ? `${empty.name} has no examples yet` : undefined;
}

/** Returns the current image of the camera or spectrogram of the microphone. */
function now(): ImageData {
  if (source === "microphone" && listener) return listener.spectrogram();
  if (source === "camera" && video.videoWidth) return crop(video, video.videoWidth, video.videoHeight);
  throw new Error(`the ${source} is not ready yet`);
}

async function fromFile(file: File): Promise<ImageData> {
  const image = await createImageBitmap(file).catch(() => {
    throw new Error(`cannot decode ${file.name} as an image`);
  });
  return crop(image, image.width, image.height);
}

async function addExample(into: Class, image: ImageData): Promise<void> {
  const features = await (await backbone).features(image);
  width = features.length;
  into.examples.push({ image, features });
  list.refresh(into);
}

async function learn(): Promise<void> {
  const missing = missingExamples();
  if (missing) throw new Error(missing);
  const classes = [...list.classes];
  const rows = classes.flatMap((c, label) => c.examples.map((e) => ({ label, features: e.features })));
  const x = new Float32Array(rows.length * width);
  rows.forEach((r, i) => x.set(r.features, i * width));
  say("Training ...");
  $("chart").hidden = false;
  const start = performance.now();
  const artifacts = await createHead({ inputs: width, classes: classes.length, optimizer: { lr: 0.003, weightDecay: 0.05 } });
  const fresh = await Trainer.create({ artifacts, device: "wasm", onMessage: say });
  chart.clear();
  let [loss, accuracy] = [0, 0];
  for await (const m of fresh.fit({ x, labels: rows.map((r) => r.label) }, { epochs: EPOCHS, batchSize: 16 })) {
    chart.add(m.step, m.loss);
    loss = m.loss;
  }
  chart.draw();
  accuracy = (await fresh.evaluate({ x, labels: rows.map((r) => r.label) }))["accuracy"] ?? 0;
  const old = trainer;
  [trainer, learned] = [fresh, classes];
  $<HTMLButtonElement>("download").disabled = false;
  $("ask-row").hidden = source !== "images";
  await old?.dispose();
  drawBars();
  say(`Trained on ${rows.length} examples of ${classes.length} classes in ${((performance.now() - start) / 1000).toFixed(1)} s: training accuracy ${(100 * accuracy).toFixed(0)} %, loss ${loss.toFixed(2)}.`);
  show("verdict", source === "images" ? "Select an image to classify." : "Show something to the camera.");
  panel.refresh();
}

function drawBars(): void {
  $("bars").replaceChildren(...learned.map((c) => make("li", { className: "bar-line" },
    make("span", { className: "label" }, c.name),
    make("span", { className: "track", "aria-hidden": "true" }, make("span", { className: "fill" })),
    make("span", { className: "share" }, "–"),
  )));
}

/** Shows the input of the network and the prediction. */
async function classify(image: ImageData): Promise<void> {
  $("view").hidden = false;
  const canvas = $<HTMLCanvasElement>("look");
  [canvas.width, canvas.height] = [SIZE, SIZE];
  canvas.getContext("2d")!.putImageData(image, 0, 0);
  const model = trainer;
  if (!model) return;
  const features = await (await backbone).features(image);
  const { logits } = await model.predict({ x: features });
  if (model !== trainer) return;
  const probabilities = softmax(logits!.data as Float32Array, learned.length);
  const top = probabilities.indexOf(Math.max(...probabilities));
  [...$("bars").children].forEach((line, i) => {
    line.classList.toggle("top", i === top);
    line.querySelector<HTMLElement>(".fill")!.style.transform = `scaleX(${probabilities[i]})`;
    line.querySelector(".share")!.textContent = `${Math.round(100 * probabilities[i]!)} %`;
  });
  show("verdict", probabilities[top]! > 0.6 ? learned[top]!.name : "Not sure");
}

/** Classifies the stream until it is closed. */
async function watch(mine: () => void): Promise<void> {
  while (close === mine) {
    const start = performance.now();
    await classify(now()).catch((error: Error) => {
      if (close === mine && trainer) fail(error);
    });
    await new Promise((resolve) => setTimeout(resolve, Math.max(20, PREDICT - (performance.now() - start))));
  }
}

async function selectSource(wanted: Source): Promise<void> {
  close?.();
  [close, listener, source] = [undefined, undefined, wanted];
  video.hidden = wanted !== "camera";
  $("look").hidden = wanted === "camera";
  $("view").hidden = wanted !== "camera";
  $("ask-row").hidden = wanted !== "images" || !trainer;
  show("source-note", NOTES[wanted]);
  list.streaming = wanted !== "images";
  list.draw();
  if (wanted === "images") return;
  const off = wanted === "camera" ? await openCamera(video) : await listen();
  if (source !== wanted) return off();
  close = off;
  say(`The ${wanted} is on. Its data stays in this tab.`);
  void watch(off);
}

async function listen(): Promise<() => void> {
  const opened = (listener = await Listener.open());
  return () => opened.close();
}

/** Trains on generated examples of three classes and classifies another one. */
async function example(): Promise<void> {
  document.querySelector<HTMLInputElement>('[value="images"]')!.checked = true;
  await selectSource("images");
  list.clear();
  for (const name of Object.keys(DRAWINGS)) {
    const fresh = list.add(name);
    for (let i = 0; i < DRAWN; i++) await addExample(fresh, draw(name));
  }
  await learn();
  await classify(draw("Stars"));
}

function trained(): Trainer {
  if (!trainer) throw new Error("train a classifier first");
  return trainer;
}

const names = () => (learned.length ? learned : list.classes).map((c) => c.name);
const panel = codePanel($("code"), {
  note: "The page does this with your examples. The exported model is one file, from pixels to logits.",
  listings: [{ name: "teach.js", text: () => training(names(), width, EPOCHS) }, { name: "classify.py", text: () => inference(names()) }],
  products: [
    { name: "classifier.onnx", about: "image [batch, 3, 64, 64] with values from 0 to 1 -> logits", bytes: async () => composeModels((await backbone).model, await trained().exportModel()) },
    { name: "names.json", about: "the class names, in the order of the logits", bytes: () => new TextEncoder().encode(JSON.stringify(names())) },
  ],
});

document.querySelectorAll<HTMLInputElement>("#sources input").forEach((input) => {
  input.onchange = () => void attempt(() => selectSource(input.value as Source));
});
$("add").onclick = () => {
  list.add();
  $("classes").lastElementChild!.querySelector("input")!.focus();
};
$("learn").onclick = () => void attempt(learn);
$("example").onclick = () => void attempt(example);
$<HTMLInputElement>("ask").onchange = (event) => void attempt(async () => {
  const file = (event.target as HTMLInputElement).files?.[0];
  if (file) await classify(await fromFile(file));
});
addEventListener("pagehide", () => close?.());

list.add();
list.add();
show("source-note", NOTES.images);
backbone.then(() => say("Ready."), fail);
