import { listing } from "./code.js";
import { drawNet, layOut, MOST, NEURON } from "./diagram.js";
import { drawDots, paint, palette } from "./field.js";
import { Net, type Shape } from "./net.js";
import { drawPoints, type Points, SETS, withPoint } from "./points.js";
import { address, pen, readAddress, readControls, settings, showPens, showSets } from "./settings.js";
import { Chart } from "../shell/chart.js";
import { codePanel } from "../shell/code-panel.js";
import { $, attempt, fail, say, show } from "../shell/dom.js";
import { calm, color, onTheme } from "../shell/theme.js";

/** How long the steps of one picture may take, and how often the numbers change, in ms. */
const BUDGET = 10;
const NUMBERS = 150;
/** With little motion wanted, pictures change this rarely. */
const STILL = 1000;

let net: Net | undefined;
let points: Points;
let fresh: Points;
let playing = !calm();
let steps = 0;
/** What has to be done before the next step. */
let stale = true;
let wanted = 0;
let wake: () => void = () => undefined;
let cross: [number, number] | undefined;
let last = { loss: NaN, accuracy: NaN };
/** The step that the numbers on the page are of, and whether the status says that it learns. */
let shown = -1;
let told: boolean | undefined;

const chart = new Chart($("chart"), [{ label: "these points", color: "--class-0" }, { label: "new points" }], { height: 190 });
const plane = $<HTMLCanvasElement>("plane");
const brush = plane.getContext("2d")!;
const classes = () => SETS[settings.set]!.classes;
const shape = (): Shape => ({ ...settings, hidden: [...settings.hidden], classes: classes() });

/** Draws points to learn from, and others that are only looked at. */
function drawNew(): void {
  points = drawPoints(settings.set, settings.count, settings.noise, settings.seed);
  fresh = drawPoints(settings.set, 300, settings.noise, settings.seed + 77);
  showPens(classes());
}

function refresh(): void {
  stale = true;
  layOut(settings.hidden, classes(), { neurons: (layer, by) => {
    settings.hidden[layer]! += by;
    refresh();
  } });
  $<HTMLButtonElement>("more").disabled = settings.hidden.length >= MOST.layers;
  $<HTMLButtonElement>("fewer").disabled = settings.hidden.length === 0;
  changed();
}

function changed(): void {
  history.replaceState(null, "", address());
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
  await picture();
  await numbers();
}

async function picture(): Promise<void> {
  if (!net) return;
  const colours = palette(net.shape.classes);
  const probabilities = await net.plane();
  const layers = await net.layers();
  paint(brush, probabilities, net.shape.classes, colours);
  drawDots(brush, points, colours);
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

async function numbers(): Promise<void> {
  if (!net) return;
  const [own, other] = [await net.judge(points), await net.judge(fresh)];
  last = { loss: own.loss, accuracy: other.accuracy };
  chart.add(steps, own.loss, other.loss);
  chart.draw();
  show("accuracy", `${(100 * other.accuracy).toFixed(0)} %`);
  show("loss", own.loss.toFixed(3));
  show("steps", steps.toLocaleString("en"));
  shown = steps;
}

function tell(): void {
  told = playing;
  if (playing) return say("Learning. Change anything while it runs.");
  const known = Number.isNaN(last.accuracy) ? "" : ` It is right about ${(100 * last.accuracy).toFixed(0)} % of new points after ${steps} steps.`;
  say(`Paused.${known}`);
}

const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));

/** Everything that touches the net happens here, one thing after the other. */
async function live(): Promise<never> {
  let counted = 0;
  let [drawn, pictured] = [0, 0];
  for (;;) {
    await frame();
    if (stale) await reopen();
    // Where pictures take long, as much time is for steps.
    const until = performance.now() + Math.max(BUDGET, pictured);
    const target = playing ? settings.pace : wanted;
    wanted = 0;
    for (let i = 0; i < target && (i === 0 || performance.now() < until) && !stale; i++) {
      await net!.step(points, settings.batch, settings.rate);
      steps++;
    }
    const now = performance.now();
    if (!playing || !calm() || now - drawn > STILL) {
      await picture();
      pictured = performance.now() - now;
      drawn = now;
    }
    if (shown !== steps && (!playing || now - counted > (calm() ? STILL : NUMBERS))) {
      await numbers();
      counted = now;
    }
    // Of a net that was paused the last numbers are told, not those of the moment it was asked to pause.
    if (told !== playing && (playing || shown === steps)) tell();
    if (!playing && !stale && !wanted && shown === steps) await new Promise<void>((resolve) => (wake = resolve));
  }
}

function play(on: boolean): void {
  playing = on;
  show("play", on ? "Pause" : "Train");
  wake();
}

function addPoint(at: [number, number]): void {
  points = withPoint(points, at, pen());
  say(`A point was added; there are ${points.labels.length}.`);
  wake();
}

$("play").onclick = () => play(!playing);
$("once").onclick = () => {
  play(false);
  told = undefined;
  wanted = 1;
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
  drawNew();
  changed();
};
$("share").onclick = () => void attempt(async () => {
  await navigator.clipboard.writeText(address());
  say("The link is in the clipboard.");
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
  drawNew();
  changed();
};
plane.onclick = (event) => {
  const box = plane.getBoundingClientRect();
  cross = undefined;
  addPoint([(2 * (event.clientX - box.left)) / box.width - 1, 1 - (2 * (event.clientY - box.top)) / box.height]);
};
plane.onkeydown = (event) => {
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
  if (!way && event.key !== "Enter" && event.key !== " ") return;
  event.preventDefault();
  const limit = (v: number) => Math.max(-1, Math.min(1, v));
  cross = way ? [limit((cross?.[0] ?? 0) + 0.08 * way[0]!), limit((cross?.[1] ?? 0) + 0.08 * way[1]!)] : (cross ?? [0, 0]);
  if (!way) addPoint(cross);
  wake();
};
plane.onblur = () => {
  cross = undefined;
  wake();
};

const need = (): Net => {
  if (!net) throw new Error("there is no net yet");
  return net;
};
const panel = codePanel($("code"), {
  note: "With npm install onnxtrain onnxruntime-web, in a page or a bundler. In Node, take onnxruntime-node and leave the device out.",
  listings: [{ name: "playground.js", text: () => listing(shape(), settings, points?.labels.length ?? 0) }],
  products: [
    { name: "model.onnx", about: "the net as it is now", bytes: () => need().trainer.exportModel() },
    { name: "checkpoint.safetensors", about: "to go on training elsewhere, in Python too", bytes: () => need().trainer.exportCheckpoint() },
  ],
});

readAddress();
const sets = () => showSets((set) => {
  settings.set = set;
  drawNew();
  refresh();
});
sets();
drawNew();
refresh();
onTheme(() => {
  sets();
  wake();
});
addEventListener("resize", () => wake());
show("play", playing ? "Pause" : "Train");
void reopen().then(tell).then(live).catch((error) => {
  playing = false;
  fail(error);
});
