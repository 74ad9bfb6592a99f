/** The plane: what the net says everywhere, as colour, and the points on it. */
import { rgb } from "../shell/theme.js";
import type { Points } from "./points.js";

/** Places per side at which the net is asked; the browser fills the rest smoothly. */
export const SIDE = 64;

/** All places of the plane, row by row from the top left. */
export const PLANE: Float32Array = (() => {
  const at = (i: number) => (2 * (i + 0.5)) / SIDE - 1;
  return Float32Array.from({ length: 2 * SIDE * SIDE }, (_, i) => {
    const place = i >> 1;
    return i % 2 ? -at(Math.floor(place / SIDE)) : at(place % SIDE);
  });
})();

type Colour = readonly [number, number, number];
const small = document.createElement("canvas");
small.width = small.height = SIDE;

/** The colours of the theme, asked for once per change. */
export const palette = (classes: number): { readonly paper: Colour; readonly of: readonly Colour[] } =>
  ({ paper: rgb("--raised"), of: Array.from({ length: classes }, (_, k) => rgb(`--class-${k}`)) });

/** Paints places with how sure the net is of its favourite class: no colour where it does not know. */
export function paint(target: CanvasRenderingContext2D, probabilities: Float32Array, classes: number, colours: ReturnType<typeof palette>): void {
  const image = new ImageData(SIDE, SIDE);
  for (let i = 0; i < SIDE * SIDE; i++) {
    let best = 0;
    for (let k = 1; k < classes; k++) if (probabilities[i * classes + k]! > probabilities[i * classes + best]!) best = k;
    const sure = (probabilities[i * classes + best]! - 1 / classes) / (1 - 1 / classes);
    mix(image.data, 4 * i, colours.paper, colours.of[best]!, 0.72 * sure ** 0.8);
  }
  put(target, image);
}

/** Paints places with the value of one neuron, from -1 (the first class's colour) to 1 (the second's). */
export function paintNeuron(target: CanvasRenderingContext2D, values: Float32Array, side: number, colours: ReturnType<typeof palette>): void {
  const image = new ImageData(side, side);
  for (let i = 0; i < side * side; i++) {
    const v = values[i]!;
    mix(image.data, 4 * i, colours.paper, colours.of[v < 0 ? 0 : 1]!, Math.min(1, Math.abs(v)));
  }
  target.putImageData(image, 0, 0);
}

function mix(data: Uint8ClampedArray, at: number, from: Colour, to: Colour, share: number): void {
  for (let c = 0; c < 3; c++) data[at + c] = from[c]! + share * (to[c]! - from[c]!);
  data[at + 3] = 255;
}

function put(target: CanvasRenderingContext2D, image: ImageData): void {
  small.getContext("2d")!.putImageData(image, 0, 0);
  target.imageSmoothingEnabled = true;
  target.imageSmoothingQuality = "high";
  target.drawImage(small, 0, 0, target.canvas.width, target.canvas.height);
}

/** Draws points over the plane; those of `rings` are hollow. */
export function drawDots(target: CanvasRenderingContext2D, points: Points, colours: ReturnType<typeof palette>, rings = false): void {
  const { width, height } = target.canvas;
  const radius = width / 88;
  for (let i = 0; i < points.labels.length; i++) {
    const [x, y] = [((points.x[2 * i]! + 1) / 2) * width, ((1 - points.x[2 * i + 1]!) / 2) * height];
    const own = `rgb(${colours.of[points.labels[i]!]!.join()})`;
    target.beginPath();
    target.arc(x, y, rings ? radius * 0.8 : radius, 0, 2 * Math.PI);
    target.lineWidth = radius / 2.2;
    if (rings) {
      target.strokeStyle = own;
    } else {
      target.fillStyle = own;
      target.fill();
      target.strokeStyle = `rgb(${colours.paper.join()})`;
    }
    target.stroke();
  }
}
