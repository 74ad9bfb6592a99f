/** The animation of the start page: a small network that trains. */
import { drawDots, paint, palette } from "../playground/field.js";
import { Net } from "../playground/net.js";
import { drawPoints } from "../playground/points.js";
import { $, show } from "../shell/dom.js";
import { reducedMotion, onTheme } from "../shell/theme.js";

const SHAPE = { classes: 2, hidden: [12, 8], activation: "tanh", decay: 0, seed: 3 } as const;
/** Steps per frame, and total number of steps. */
const STEPS_PER_FRAME = 4;
const TOTAL_STEPS = 2400;
const canvas = $<HTMLCanvasElement>("live");
const brush = canvas.getContext("2d")!;
const points = drawPoints("spirals", 220, 0.05, 5);

async function draw(net: Net): Promise<void> {
  const colors = palette(2);
  paint(brush, await net.plane(), 2, colors);
  drawDots(brush, points, colors);
}

async function live(): Promise<void> {
  const colors = palette(2);
  brush.fillStyle = `rgb(${colors.paper.join()})`;
  brush.fillRect(0, 0, canvas.width, canvas.height);
  drawDots(brush, points, colors);
  // The runtime has 4 MB: respect the data saver setting.
  if ((navigator as { connection?: { saveData?: boolean } }).connection?.saveData) return;
  const net = await Net.open(SHAPE);
  onTheme(() => void draw(net));
  const still = reducedMotion();
  let drawn = 0;
  for (let step = 1; step <= TOTAL_STEPS; step++) {
    await net.step(points, 24, 0.02);
    if (step % (still ? 400 : STEPS_PER_FRAME) || performance.now() < drawn) continue;
    await new Promise((resolve) => requestAnimationFrame(resolve));
    const start = performance.now();
    await draw(net);
    // If drawing is slow, spend at least as much time on training.
    drawn = 2 * performance.now() - start;
    show("live-text", `Step ${step} of a network with 20 hidden neurons, training in your browser.`);
  }
  await draw(net);
  show("live-text", `A network with 20 hidden neurons, trained in your browser in ${TOTAL_STEPS} steps.`);
}

void live().catch(() => show("live-text", "This browser cannot run ONNX Runtime."));
