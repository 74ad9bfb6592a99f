import { listing } from "./code.js";
import { drawNet, layoutDiagram, MAX, NEURON } from "./diagram.js";
import { drawDots, paint, palette } from "./field.js";
import { Net, type Shape } from "./net.js";
import { drawPoints, type Points, SETS, withPoint } from "./points.js";
import { settingsUrl, pen, readUrl, readControls, settings, showPens, showSets } from "./settings.js";
import { Chart } from "../shell/chart.js";
import { codePanel } from "../shell/code-panel.js";
import { $, attempt, fail, say, show } from "../shell/dom.js";
import { reducedMotion, color, onTheme } from "../shell/theme.js";

/** Time for the steps of one frame, and interval between updates of the metrics, in ms. */
const BUDGET = 10;
const METRICS_INTERVAL = 150;
/** Interval between frames with prefers-reduced-motion, in ms. */
const REDUCED_INTERVAL = 1000;

let net: Net | undefined;
let points: Points;
let testPoints: Points;
let playing = !reducedMotion();
let steps = 0;
/** Whether the network has to be rebuilt before the next step. */
let stale = true;
let requestedSteps = 0;
let wake: () => void = () => undefined;
let cross: [number, number] | undefined;
let last = { loss: NaN, accuracy: NaN };
/** The step of the displayed metrics, and the last reported state of `playing`. */
let shown = -1;
let reported: boolean | undefined;

const chart = new Chart($("chart"), [{ label: "training loss", color: "--class-0" }, { label: "test loss" }], { height: 190 });
const plane = $<HTMLCanvasElement>("plane");
const brush = plane.getContext("2d")!;
const classes = () => SETS[settings.set]!.classes;
const shape = (): Shape => ({ ...settings, hidden: [...settings.hidden], classes: classes() });

/** Samples training and test points. */
function samplePoints(): void {
  points = drawPoints(settings.set, settings.count, settings.noise, settings.seed);
  testPoints = drawPoints(settings.set, 300, settings.noise, settings.seed + 77);
  showPens(classes());
}

function refresh(): void {
  stale = true;
  layoutDiagram(settings.hidden, classes(), { neurons: (layer, by) => {
    settings.hidden[layer]! += by;
    refresh();
  } });
  $<HTMLButtonElement>("more").disabled = settings.hidden.length >= MAX.layers;
  $<HTMLButtonElement>("fewer").disabled = settings.hidden.length === 0;
  changed();
}

function changed(): void {
  history.replaceState(null, "", settingsUrl());
  panel.refresh();
  wake();
}

async function reopen(): Promise<void> {
  stale = false;
  const next = await Net.open(shape());
  await net?.close();
  net = next;
  steps = 0;
  chart.clear();
  await drawFrame();
  await updateMetrics();
}

async function drawFrame(): Promise<void> {
  if (!net) return;
  const colors = palette(net.shape.classes);
  const probabilities = await net.plane();
  const layers = await net.layers();
  paint(brush, probabilities, net.shape.classes, colors);
  drawDots(brush, points, colors);
  if (cross) drawCross(cross);
  drawNet(layers, net.neurons(layers, NEURON));
}

function drawCross([x, y]: [number, number]): void {
  const [px, py] = [((x + 1) / 2) * plane.width, ((1 - y) / 2) * plane.height];
  brush.strokeStyle = color("--ink");
  brush.lineWidth = 3;
  brush.beginPath();
  for (const [dx, dy] of [[1, 0], [-1, 0], [0, 1], [0, -1]] as const) {
    brush.moveTo(px + 6 * dx, py + 6 * dy);
    brush.lineTo(px + 20 * dx, py + 20 * dy);
  }
  brush.stroke();
}

async function updateMetrics(): Promise<void> {
  if (!net) return;
  const [own, other] = [await net.evaluate(points), await net.evaluate(testPoints)];
  last = { loss: own.loss, accuracy: other.accuracy };
  chart.add(steps, own.loss, other.loss);
  chart.draw();
  show("accuracy", `${(100 * other.accuracy).toFixed(0)} %`);
  show("loss", own.loss.toFixed(3));
  show("steps", steps.toLocaleString("en"));
  shown = steps;
}

function reportStatus(): void {
  reported = playing;
  if (playing) return say("Training. You can change everything while it runs.");
  const accuracy = Number.isNaN(last.accuracy) ? "" : ` Test accuracy ${(100 * last.accuracy).toFixed(0)} % after ${steps} steps.`;
  say(`Paused.${accuracy}`);
}

const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));

/** The main loop. All access to the network happens here, in order. */
async function mainLoop(): Promise<never> {
  let counted = 0;
  let [drawn, frameTime] = [0, 0];
  for (;;) {
    await frame();
    if (stale) await reopen();
    // If drawing is slow, spend at least as much time on training.
    const until = performance.now() + Math.max(BUDGET, frameTime);
    const target = playing ? settings.pace : requestedSteps;
    requestedSteps = 0;
    for (let i = 0; i < target && (i === 0 || performance.now() < until) && !stale; i++) {
      await net!.step(points, settings.batch, settings.rate);
      steps++;
    }
    const now = performance.now();
    if (!playing || !reducedMotion() || now - drawn > REDUCED_INTERVAL) {
      await drawFrame();
      frameTime = performance.now() - now;
      drawn = now;
    }
    if (shown !== steps && (!playing || now - counted > (reducedMotion() ? REDUCED_INTERVAL : METRICS_INTERVAL))) {
      await updateMetrics();
      counted = now;
    }
    // After a pause, report the metrics of the last step.
    if (reported !== playing && (playing || shown === steps)) reportStatus();
    if (!playing && !stale && !requestedSteps && shown === steps) await new Promise<void>((resolve) => (wake = resolve));
  }
}

function play(on: boolean): void {
  playing = on;
  show("play", on ? "Pause" : "Train");
  wake();
}

function addPoint(at: [number, number]): void {
  points = withPoint(points, at, pen());
  say(`Added a point: ${points.labels.length} points.`);
  wake();
}

$("play").onclick = () => play(!playing);
$("once").onclick = () => {
  play(false);
  reported = undefined;
  requestedSteps = 1;
  wake();
};
$("again").onclick = () => {
  settings.seed++;
  refresh();
};
$("more").onclick = () => {
  settings.hidden.push(settings.hidden.at(-1) ?? 4);
  refresh();
};
$("fewer").onclick = () => {
  settings.hidden.pop();
  refresh();
};
$("fresh").onclick = () => {
  settings.seed++;
  samplePoints();
  changed();
};
$("share").onclick = () => void attempt(async () => {
  await navigator.clipboard.writeText(settingsUrl());
  say("Link copied to the clipboard.");
});
for (const id of ["rate", "batch", "paces"]) $(id).onchange = () => {
  readControls();
  changed();
};
for (const id of ["activation", "decay"]) $(id).onchange = () => {
  readControls();
  refresh();
};
for (const id of ["noise", "count"]) $(id).oninput = () => {
  readControls();
  samplePoints();
  changed();
};
plane.onclick = (event) => {
  const box = plane.getBoundingClientRect();
  cross = undefined;
  addPoint([(2 * (event.clientX - box.left)) / box.width - 1, 1 - (2 * (event.clientY - box.top)) / box.height]);
};
plane.onkeydown = (event) => {
  const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
  if (!direction && event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  const limit = (v: number) => Math.max(-1, Math.min(1, v));
  cross = direction ? [limit((cross?.[0] ?? 0) + 0.08 * direction[0]!), limit((cross?.[1] ?? 0) + 0.08 * direction[1]!)] : (cross ?? [0, 0]);
  if (!direction) addPoint(cross);
  wake();
};
plane.onblur = () => {
  cross = undefined;
  wake();
};

const currentNet = (): Net => {
  if (!net) throw new Error("the network is not ready yet");
  return net;
};
const panel = codePanel($("code"), {
  note: "Run npm install onnxtrain onnxruntime-web. In Node, install onnxruntime-node instead and omit the device.",
  listings: [{ name: "playground.js", text: () => listing(shape(), settings, points?.labels.length ?? 0) }],
  products: [
    { name: "model.onnx", about: "the current network", bytes: () => currentNet().trainer.exportModel() },
    { name: "checkpoint.safetensors", about: "to resume training, also in Python", bytes: () => currentNet().trainer.exportCheckpoint() },
  ],
});

readUrl();
const sets = () => showSets((set) => {
  settings.set = set;
  samplePoints();
  refresh();
});
sets();
samplePoints();
refresh();
onTheme(() => {
  sets();
  wake();
});
addEventListener("resize", () => wake());
show("play", playing ? "Pause" : "Train");
void reopen().then(reportStatus).then(mainLoop).catch((error) => {
  playing = false;
  fail(error);
});
