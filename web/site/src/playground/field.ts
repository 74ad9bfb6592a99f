/** The plane: predictions as background colors, and the data points. */
import { rgb } from "../shell/theme.js";
import type { Points } from "./points.js";

/** Resolution of the predictions; the canvas interpolates. */
export const SIDE = 64;

/** The grid points of the plane, row by row from the top left. */
export const PLANE: Float32Array = (() => {
  const at = (i: number) => (2 * (i + 0.5)) / SIDE - 1;
  return Float32Array.from({ length: 2 * SIDE * SIDE }, (_, i) => {
    const cell = i >> 1;
    return i % 2 ? -at(Math.floor(cell / SIDE)) : at(cell % SIDE);
  });
})();

type Color = readonly [number, number, number];
const small = document.createElement("canvas");
small.width = small.height = SIDE;

/** Returns the background and class colors of the current theme. */
export const palette = (classes: number): { readonly paper: Color; readonly of: readonly Color[] } =>
  ({ paper: rgb("--raised"), of: Array.from({ length: classes }, (_, k) => rgb(`--class-${k}`)) });

/** Colors the plane by the predicted class; saturation shows the confidence. */
export function paint(target: CanvasRenderingContext2D, probabilities: Float32Array, classes: number, colors: ReturnType<typeof palette>): void {
  const image = new ImageData(SIDE, SIDE);
  for (let i = 0; i < SIDE * SIDE; i++) {
    let best = 0;
    for (let k = 1; k < classes; k++) if (probabilities[i * classes + k]! > probabilities[i * classes + best]!) best = k;
    const confidence = (probabilities[i * classes + best]! - 1 / classes) / (1 - 1 / classes);
    mix(image.data, 4 * i, colors.paper, colors.of[best]!, 0.72 * confidence ** 0.8);
  }
  put(target, image);
}

/** Colors a heatmap by the activation of one neuron, from -1 (color of class 0) to 1 (color of class 1). */
export function paintNeuron(target: CanvasRenderingContext2D, values: Float32Array, side: number, colors: ReturnType<typeof palette>): void {
  const image = new ImageData(side, side);
  for (let i = 0; i < side * side; i++) {
    const v = values[i]!;
    mix(image.data, 4 * i, colors.paper, colors.of[v < 0 ? 0 : 1]!, Math.min(1, Math.abs(v)));
  }
  target.putImageData(image, 0, 0);
}

function mix(data: Uint8ClampedArray, at: number, from: Color, to: Color, share: number): void {
  for (let c = 0; c < 3; c++) data[at + c] = from[c]! + share * (to[c]! - from[c]!);
  data[at + 3] = 255;
}

function put(target: CanvasRenderingContext2D, image: ImageData): void {
  small.getContext("2d")!.putImageData(image, 0, 0);
  target.imageSmoothingEnabled = true;
  target.imageSmoothingQuality = "high";
  target.drawImage(small, 0, 0, target.canvas.width, target.canvas.height);
}

/** Draws data points; with `rings` they are hollow. */
export function drawDots(target: CanvasRenderingContext2D, points: Points, colors: ReturnType<typeof palette>, rings = false): void {
  const { width, height } = target.canvas;
  const radius = width / 88;
  for (let i = 0; i < points.labels.length; i++) {
    const [x, y] = [((points.x[2 * i]! + 1) / 2) * width, ((1 - points.x[2 * i + 1]!) / 2) * height];
    const own = `rgb(${colors.of[points.labels[i]!]!.join()})`;
    target.beginPath();
    target.arc(x, y, rings ? radius * 0.8 : radius, 0, 2 * Math.PI);
    target.lineWidth = radius / 2.2;
    if (rings) {
      target.strokeStyle = own;
    } else {
      target.fillStyle = own;
      target.fill();
      target.strokeStyle = `rgb(${colors.paper.join()})`;
    }
    target.stroke();
  }
}
