import type { Digits } from "./data.js";
import { $, make } from "../shell/dom.js";
import { rgb } from "../shell/theme.js";


let lines: { line: HTMLElement; fill: HTMLElement; share: HTMLElement }[] = [];

/** Creates a bar for each class. */
export function createBars(names: readonly string[]): void {
  lines = names.map((name) => {
    const fill = make("span", { className: "fill" });
    const share = make("span", { className: "share" });
    return { fill, share, line: make("li", { className: "bar-line" }, make("span", {}, name), make("span", { className: "track" }, fill), share) };
  });
  $("bars").replaceChildren(...lines.map((l) => l.line));
}

/** Shows probabilities, or empty bars. */
export function showBars(probabilities?: Float32Array): void {
  const top = probabilities ? probabilities.indexOf(Math.max(...probabilities)) : -1;
  lines.forEach(({ line, fill, share }, k) => {
    const p = probabilities?.[k] ?? 0;
    fill.style.transform = `scaleX(${p})`;
    share.textContent = probabilities ? `${(100 * p).toFixed(0)} %` : "";
    line.classList.toggle("top", k === top);
  });
}


/** Creates a canvas from gray values between 0 and 1. */
export function grayImage(pixels: Float32Array, side: number): HTMLCanvasElement {
  const canvas = make("canvas", { width: side, height: side });
  const image = new ImageData(side, side);
  pixels.forEach((v, i) => image.data.set([255 * v, 255 * v, 255 * v, 255], 4 * i));
  canvas.getContext("2d")!.putImageData(image, 0, 0);
  return canvas;
}

/** Shows test digits with empty captions for the predictions. */
export function showDigits(digits: Digits, count: number, side: number): void {
  $("grid").replaceChildren(...Array.from({ length: count }, (_, i) => {
    const canvas = grayImage(digits.image.subarray(i * side ** 2, (i + 1) * side ** 2), side);
    canvas.setAttribute("aria-hidden", "true");
    return make("figure", {}, canvas, make("figcaption", {}, "?"));
  }));
}

/** Shows the prediction below each digit. */
export function showPredictions(predictions: readonly number[], labels: Uint8Array, names: readonly string[]): void {
  [...$("grid").children].forEach((figure, i) => {
    const right = predictions[i] === labels[i];
    figure.className = right ? "right" : "wrong";
    figure.lastElementChild!.textContent = `${names[predictions[i]!]} ${right ? "✓" : "✗"}`;
  });
}

/** Shows weights as images: orange for positive, blue for negative weights. */
export function showTiles(tiles: readonly Float32Array[], side: number): void {
  const place = $("tiles");
  while (place.children.length > tiles.length) place.lastElementChild!.remove();
  while (place.children.length < tiles.length) place.append(make("canvas"));
  const [paper, less, more] = [rgb("--raised"), rgb("--class-0"), rgb("--class-1")];
  tiles.forEach((weights, t) => {
    const canvas = place.children[t] as HTMLCanvasElement;
    if (canvas.width !== side) canvas.width = canvas.height = side;
    const image = new ImageData(side, side);
    const most = weights.reduce((a, v) => Math.max(a, Math.abs(v)), 1e-6);
    weights.forEach((v, i) => {
      const [to, share] = [v < 0 ? less : more, Math.abs(v) / most];
      image.data.set([...paper.map((c, k) => c + share * (to[k]! - c)), 255], 4 * i);
    });
    canvas.getContext("2d")!.putImageData(image, 0, 0);
  });
}

/** Fills the confusion matrix. */
export function showConfusion(predictions: readonly number[], labels: Uint8Array, names: readonly string[]): void {
  const counts = names.map(() => names.map(() => 0));
  predictions.forEach((g, i) => counts[labels[i]!]![g]!++);
  const rows = counts.map((row, label) => ({ row, label })).filter(({ row, label }) => label < 10 || row.some((n) => n > 0));
  const cell = (n: number, label: number, predicted: number, total: number) => {
    const td = make("td", {}, n ? String(n) : "");
    td.className = n === 0 ? "" : label === predicted ? "hit" : "miss";
    td.style.setProperty("--share", String(Math.min(1, label === predicted ? n / total : 0.25 + (4 * n) / total)));
    return td;
  };
  $("confusion").replaceChildren(
    make("caption", { className: "visually-hidden" }, "Rows: labels. Columns: predictions."),
    make("thead", {}, make("tr", {}, make("td", {}), ...names.map((n) => make("th", { scope: "col" }, n)))),
    make("tbody", {}, ...rows.map(({ row, label }) => {
      const total = row.reduce((a, b) => a + b, 0);
      return make("tr", {}, make("th", { scope: "row" }, names[label]!), ...row.map((n, predicted) => cell(n, label, predicted, total)));
    })),
  );
}

/** Returns the argmax of each row. */
export function argmax(logits: Float32Array, classes: number): number[] {
  return Array.from({ length: logits.length / classes }, (_, i) => {
    const row = logits.subarray(i * classes, (i + 1) * classes);
    return row.indexOf(Math.max(...row));
  });
}
