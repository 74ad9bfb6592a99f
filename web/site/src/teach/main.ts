/** Classes of one's own: examples, a head that is trained here, and what it says. */
import { createHead, Trainer } from "onnxtrain";
import { Eye, join, SIZE, small } from "./backbone.js";
import { type Class, ClassList, eachFile } from "./classes.js";
import { teaching, using } from "./code.js";
import { draw, DRAWINGS } from "./example.js";
import { Ear } from "./sound.js";
import { openCamera } from "../runner/camera.js";
import { Chart } from "../shell/chart.js";
import { codePanel } from "../shell/code-panel.js";
import { $, attempt, fail, make, say, show } from "../shell/dom.js";
import { softmax } from "../shell/softmax.js";

type Source = "camera" | "microphone" | "pictures";
const EPOCHS = 40;
/** Between examples that are recorded, and between questions, in ms. */
const RECORD: Record<Source, number> = { camera: 120, microphone: 200, pictures: 0 };
const ASK = 120;
/** Of each thing that the page draws itself: with ten, a star in six was taken for a ball. */
const DRAWN = 24;
const NOTES: Record<Source, string> = {
  camera: "Hold a button while the camera sees the thing, from all sides. Twenty examples of each are good.",
  microphone: "Hold a button while the sound is there. Make the first class silence, so that it has something to say when nobody does.",
  pictures: "Choose some pictures of each thing; the middle square counts. Eight of each are a start.",
};

const video = $<HTMLVideoElement>("camera");
const chart = new Chart($("chart"), [{ label: "loss" }], { height: 130 });
const eye = Eye.open();
let source: Source = "pictures";
let close: (() => void) | undefined;
let ear: Ear | undefined;
let trainer: Trainer | undefined;
/** The classes that the trainer knows, in its order. */
let learned: readonly Class[] = [];
let width = 528;

const list = new ClassList($("classes"), {
  record: (into) => {
    const timer = setInterval(() => void attempt(() => take(into, now())), RECORD[source]);
    return () => clearInterval(timer);
  },
  files: async (into, files) => {
    say(await eachFile(files, into.name, async (file) => await take(into, await fromFile(file))));
  },
  changed: () => {
    $<HTMLButtonElement>("learn").disabled = ready() !== undefined;
    panel?.refresh();
  },
});

/** Returns what is missing before anything can be learned. */
function ready(): string | undefined {
  if (list.classes.length < 2) return "two classes are needed";
  const empty = list.classes.find((c) => c.examples.length === 0);
  return empty ? `${empty.name} has no examples yet` : undefined;
}

/** Returns what the camera or the microphone has at this moment. */
function now(): ImageData {
  if (source === "microphone" && ear) return ear.picture();
  if (source === "camera" && video.videoWidth) return small(video, video.videoWidth, video.videoHeight);
  throw new Error(`the ${source} is not ready yet`);
}

async function fromFile(file: File): Promise<ImageData> {
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`${file.name} is no picture that this browser can read`);
  });
  return small(picture, picture.width, picture.height);
}

async function take(into: Class, picture: ImageData): Promise<void> {
  const features = await (await eye).features(picture);
  width = features.length;
  into.examples.push({ picture, features });
  list.refresh(into);
}

async function learn(): Promise<void> {
  const missing = ready();
  if (missing) throw new Error(missing);
  const classes = [...list.classes];
  const rows = classes.flatMap((c, label) => c.examples.map((e) => ({ label, features: e.features })));
  const x = new Float32Array(rows.length * width);
  rows.forEach((r, i) => x.set(r.features, i * width));
  say("It learns ...");
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
  await old?.dispose();
  drawBars();
  say(`Learned ${rows.length} examples of ${classes.length} classes in ${((performance.now() - start) / 1000).toFixed(1)} s: ${(100 * accuracy).toFixed(0)} % of them right, loss ${loss.toFixed(2)}.`);
  show("verdict", source === "pictures" ? "Ask about a picture." : "Show it something.");
  panel.refresh();
}

function drawBars(): void {
  $("bars").replaceChildren(...learned.map((c) => make("li", { className: "bar-line" },
    make("span", { className: "label" }, c.name),
    make("span", { className: "track", "aria-hidden": "true" }, make("span", { className: "fill" })),
    make("span", { className: "share" }, "–"),
  )));
}

/** Shows a picture as the net sees it, and what it thinks it is. */
async function judge(picture: ImageData): Promise<void> {
  const look = $<HTMLCanvasElement>("look");
  [look.width, look.height] = [SIZE, SIZE];
  look.getContext("2d")!.putImageData(picture, 0, 0);
  const model = trainer;
  if (!model) return;
  const features = await (await eye).features(picture);
  const { logits } = await model.predict({ x: features });
  if (model !== trainer) return;
  const chances = softmax(logits!.data as Float32Array, learned.length);
  const top = chances.indexOf(Math.max(...chances));
  [...$("bars").children].forEach((line, i) => {
    line.classList.toggle("top", i === top);
    line.querySelector<HTMLElement>(".fill")!.style.transform = `scaleX(${chances[i]})`;
    line.querySelector(".share")!.textContent = `${Math.round(100 * chances[i]!)} %`;
  });
  show("verdict", chances[top]! > 0.6 ? learned[top]!.name : "Not sure");
}

/** Asks about the stream as long as it is on. */
async function watch(mine: () => void): Promise<void> {
  while (close === mine) {
    const start = performance.now();
    await judge(now()).catch((error: Error) => {
      if (close === mine && trainer) fail(error);
    });
    await new Promise((resolve) => setTimeout(resolve, Math.max(20, ASK - (performance.now() - start))));
  }
}

async function choose(wanted: Source): Promise<void> {
  close?.();
  [close, ear, source] = [undefined, undefined, wanted];
  video.hidden = wanted !== "camera";
  $("look").hidden = wanted === "camera";
  $("ask-row").hidden = wanted !== "pictures";
  show("source-note", NOTES[wanted]);
  list.streaming = wanted !== "pictures";
  list.draw();
  if (wanted === "pictures") return;
  const off = wanted === "camera" ? await openCamera(video) : await listen();
  if (source !== wanted) return off();
  close = off;
  say(`The ${wanted} is on. Nothing of it leaves this tab.`);
  void watch(off);
}

async function listen(): Promise<() => void> {
  const opened = (ear = await Ear.open());
  return () => opened.close();
}

/** Draws examples of three things, learns them, and asks about one. */
async function example(): Promise<void> {
  document.querySelector<HTMLInputElement>('[value="pictures"]')!.checked = true;
  await choose("pictures");
  list.clear();
  for (const name of Object.keys(DRAWINGS)) {
    const fresh = list.add(name);
    for (let i = 0; i < DRAWN; i++) await take(fresh, draw(name));
  }
  await learn();
  await judge(draw("Stars"));
}

function trained(): Trainer {
  if (!trainer) throw new Error("nothing is learned yet");
  return trainer;
}

const names = () => (learned.length ? learned : list.classes).map((c) => c.name);
const panel = codePanel($("code"), {
  note: "The page does this with your examples. The model that you download is one file, from pixels to scores.",
  listings: [{ name: "teach.js", text: () => teaching(names(), width, EPOCHS) }, { name: "ask.py", text: () => using(names()) }],
  products: [
    { name: "classifier.onnx", about: "image [batch, 3, 64, 64] of 0 to 1 to logits", bytes: async () => join((await eye).model, await trained().exportModel()) },
    { name: "names.json", about: "the names of the classes, in their order", bytes: () => new TextEncoder().encode(JSON.stringify(names())) },
  ],
});

document.querySelectorAll<HTMLInputElement>("#sources input").forEach((input) => {
  input.onchange = () => void attempt(() => choose(input.value as Source));
});
$("add").onclick = () => {
  list.add();
  $("classes").lastElementChild!.querySelector("input")!.focus();
};
$("learn").onclick = () => void attempt(learn);
$("example").onclick = () => void attempt(example);
$<HTMLInputElement>("ask").onchange = (event) => void attempt(async () => {
  const file = (event.target as HTMLInputElement).files?.[0];
  if (file) await judge(await fromFile(file));
});
addEventListener("pagehide", () => close?.());

list.add();
list.add();
show("source-note", NOTES.pictures);
eye.then(() => say("Ready."), fail);
