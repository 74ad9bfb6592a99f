/** The picture of the start page: a net that learns, while the page is looked at. */
import { drawDots, paint, palette } from "../playground/field.js";
import { Net } from "../playground/net.js";
import { drawPoints } from "../playground/points.js";
import { $, show } from "../shell/dom.js";
import { calm, onTheme } from "../shell/theme.js";

const SHAPE = { classes: 2, hidden: [12, 8], activation: "tanh", decay: 0, seed: 3 } as const;
/** Steps per picture, and after how many it has learned enough. */
const PACE = 4;
const ENOUGH = 2400;
const canvas = $<HTMLCanvasElement>("live");
const brush = canvas.getContext("2d")!;
const points = drawPoints("spirals", 220, 0.05, 5);

async function draw(net: Net): Promise<void> {
  const colours = palette(2);
  paint(brush, await net.plane(), 2, colours);
  drawDots(brush, points, colours);
}

async function live(): Promise<void> {
  const colours = palette(2);
  brush.fillStyle = `rgb(${colours.paper.join()})`;
  brush.fillRect(0, 0, canvas.width, canvas.height);
  drawDots(brush, points, colours);
  // The runtime is 4 MB: not for those who want to save data.
  if ((navigator as { connection?: { saveData?: boolean } }).connection?.saveData) return;
  const net = await Net.open(SHAPE);
  onTheme(() => void draw(net));
  const still = calm();
  let drawn = 0;
  for (let step = 1; step <= ENOUGH; step++) {
    await net.step(points, 24, 0.02);
    if (step % (still ? 400 : PACE) || performance.now() < drawn) continue;
    await new Promise((resolve) => requestAnimationFrame(resolve));
    const began = performance.now();
    await draw(net);
    // Where pictures take long, as much time is for steps.
    drawn = 2 * performance.now() - began;
    show("live-text", `Step ${step} of a net with 20 neurons, trained by your browser right now.`);
  }
  await draw(net);
  show("live-text", `A net with 20 neurons, trained by your browser in ${ENOUGH} steps just now.`);
}

void live().catch(() => show("live-text", "This browser cannot run it."));
