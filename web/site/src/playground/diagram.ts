/** The network diagram: a column per layer, a heatmap per neuron, a line per weight. */
import { paintNeuron, palette } from "./field.js";
import type { Layer } from "./net.js";
import { $, make } from "../shell/dom.js";
import { color, rgb } from "../shell/theme.js";

/** Resolution of a neuron's heatmap. */
export const NEURON = 20;
export const MAX = { layers: 5, neurons: 8 };

/** Edits of the layers. */
export interface LayerEdits {
  neurons(layer: number, by: number): void;
}

let heatmaps: HTMLCanvasElement[][] = [];
let ends: { inputs: HTMLElement[]; outputs: HTMLElement[] } = { inputs: [], outputs: [] };

const button = (text: string, label: string, onclick: () => void, disabled: boolean) =>
  make("button", { type: "button", className: "step", onclick, disabled, "aria-label": label }, text);

/** Rebuilds the columns and keeps the focus on the pressed button. */
export function layoutDiagram(hidden: readonly number[], classes: number, edits: LayerEdits): void {
  const place = $("layers");
  const focused = (document.activeElement as HTMLElement | null)?.getAttribute("aria-label");
  const column = (name: string, top: Node, cells: HTMLElement[]) =>
    make("div", { className: "column" }, make("div", { className: "column-head" }, make("span", { className: "column-name" }, name), top), make("div", { className: "cells" }, ...cells));
  const inputs = ["x", "y"].map((axis) => make("span", { className: "cell axis" }, axis));
  const outputs = Array.from({ length: classes }, (_, k) => make("span", { className: `cell output class-${k}` }));
  heatmaps = hidden.map((n) => Array.from({ length: n }, () => {
    const canvas = make("canvas", { className: "cell neuron", width: NEURON, height: NEURON });
    canvas.setAttribute("aria-hidden", "true");
    return canvas;
  }));
  const heads = hidden.map((n, i) => make("div", { className: "steps-of" },
    button("−", `Layer ${i + 1}: remove a neuron`, () => edits.neurons(i, -1), n <= 1),
    make("span", { className: "count" }, String(n)),
    button("+", `Layer ${i + 1}: add a neuron`, () => edits.neurons(i, 1), n >= MAX.neurons)));
  ends = { inputs, outputs };
  place.replaceChildren(
    column("Input", make("span", { className: "count" }, "2"), inputs),
    ...hidden.map((_, i) => column(`Layer ${i + 1}`, heads[i]!, heatmaps[i]!)),
    column("Classes", make("span", { className: "count" }, String(classes)), outputs),
  );
  if (focused) place.querySelector<HTMLElement>(`[aria-label="${focused}"]`)?.focus();
  const layers = hidden.length ? `hidden layers of ${hidden.join(", ")} neurons` : "no hidden layers";
  $("wires").setAttribute("aria-label", `Network: 2 inputs, ${layers}, ${classes} classes`);
}

/** Draws the heatmaps of the neurons and the weights. */
export function drawNet(layers: readonly Layer[], neurons: readonly Float32Array[][]): void {
  const colors = palette(2);
  neurons.forEach((layer, i) => layer.forEach((values, j) => {
    const canvas = heatmaps[i]?.[j];
    if (canvas) paintNeuron(canvas.getContext("2d")!, values, NEURON, colors);
  }));
  drawWires(layers);
}

function drawWires(layers: readonly Layer[]): void {
  const canvas = $<HTMLCanvasElement>("wires");
  const box = canvas.parentElement!.getBoundingClientRect();
  const scale = Math.min(2, devicePixelRatio || 1);
  const [width, height] = [Math.round(box.width * scale), Math.round(box.height * scale)];
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const pen = canvas.getContext("2d")!;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, box.width, box.height);
  const columns = [ends.inputs, ...heatmaps, ends.outputs].map((cells) => cells.map((cell) => {
    const r = cell.getBoundingClientRect();
    return { left: r.left - box.left, right: r.right - box.left, y: r.top - box.top + r.height / 2 };
  }));
  const tones = [rgb("--class-0"), rgb("--class-1")];
  const plain = color("--line");
  layers.forEach(({ weight }, l) => {
    const [from, to] = [columns[l]!, columns[l + 1]!];
    if (!from || !to || weight.length !== from.length * to.length) return;
    to.forEach((end, j) => from.forEach((start, i) => {
      const w = weight[j * from.length + i]!;
      const strength = Math.min(1, Math.abs(w) / 2);
      pen.strokeStyle = strength < 0.02 ? plain : `rgba(${tones[w < 0 ? 0 : 1]!.join()}, ${0.15 + 0.7 * strength})`;
      pen.lineWidth = 0.75 + 3.5 * strength;
      const middle = (start.right + end.left) / 2;
      pen.beginPath();
      pen.moveTo(start.right, start.y);
      pen.bezierCurveTo(middle, start.y, middle, end.y, end.left, end.y);
      pen.stroke();
    }));
  });
}
