import type { Digits } from "./data.js";
import { $, make } from "../shell/dom.js";
import { rgb } from "../shell/theme.js";

/** How sure the net is of each class, as bars. */

let lines: { line: HTMLElement; fill: HTMLElement; share: HTMLElement }[] = [];

/** Lays a bar out per class. */
export function layBars(names: readonly string[]): void {
  lines = names.map((name) => {
    const fill = make("span", { className: "fill" });
    const share = make("span", { className: "share" });
    return { fill, share, line: make("li", { className: "bar-line" }, make("span", {}, name), make("span", { className: "track" }, fill), share) };
  });
  $("bars").replaceChildren(...lines.map((l) => l.line));
}

/** Shows probabilities, or none. */
export function showBars(probabilities?: Float32Array): void {
  const top = probabilities ? probabilities.indexOf(Math.max(...probabilities)) : -1;
  lines.forEach(({ line, fill, share }, k) => {
    const p = probabilities?.[k] ?? 0;
    fill.style.transform = `scaleX(${p})`;
    share.textContent = probabilities ? `${(100 * p).toFixed(0)} %` : "";
    line.classList.toggle("top", k === top);
  });
}

/** What the net sees and says: digits, weights, and a table of its mistakes. */

/** Makes a canvas of gray pixels from 0 to 1. */
export function grayPicture(pixels: Float32Array, side: number): HTMLCanvasElement {
  const canvas = make("canvas", { width: side, height: side });
  const image = new ImageData(side, side);
  pixels.forEach((v, i) => image.data.set([255 * v, 255 * v, 255 * v, 255], 4 * i));
  canvas.getContext("2d")!.putImageData(image, 0, 0);
  return canvas;
}

/** Shows digits, each with a place for what the net takes it for. */
export function showDigits(digits: Digits, count: number, side: number): void {
  $("grid").replaceChildren(...Array.from({ length: count }, (_, i) => {
    const canvas = grayPicture(digits.image.subarray(i * side ** 2, (i + 1) * side ** 2), side);
    canvas.setAttribute("aria-hidden", "true");
    return make("figure", {}, canvas, make("figcaption", {}, "?"));
  }));
}

/** Says under each digit what the net takes it for. */
export function showGuesses(guesses: readonly number[], labels: Uint8Array, names: readonly string[]): void {
  [...$("grid").children].forEach((figure, i) => {
    const right = guesses[i] === labels[i];
    figure.className = right ? "right" : "wrong";
    figure.lastElementChild!.textContent = `${names[guesses[i]!]} ${right ? "✓" : "✗"}`;
  });
}

/** Shows what each neuron of the first layer looks for: orange where ink speaks for it, blue where it speaks against. */
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

/** Fills the table of what is taken for what. */
export function showConfusion(guesses: readonly number[], labels: Uint8Array, names: readonly string[]): void {
  const counts = names.map(() => names.map(() => 0));
  guesses.forEach((g, i) => counts[labels[i]!]![g]!++);
  const rows = counts.map((row, is) => ({ row, is })).filter(({ row, is }) => is < 10 || row.some((n) => n > 0));
  const cell = (n: number, is: number, taken: number, total: number) => {
    const td = make("td", {}, n ? String(n) : "");
    td.className = n === 0 ? "" : is === taken ? "hit" : "miss";
    td.style.setProperty("--share", String(Math.min(1, is === taken ? n / total : 0.25 + (4 * n) / total)));
    return td;
  };
  $("confusion").replaceChildren(
    make("caption", { className: "visually-hidden" }, "Rows: what a picture shows. Columns: what the net takes it for."),
    make("thead", {}, make("tr", {}, make("td", {}), ...names.map((n) => make("th", { scope: "col" }, n)))),
    make("tbody", {}, ...rows.map(({ row, is }) => {
      const total = row.reduce((a, b) => a + b, 0);
      return make("tr", {}, make("th", { scope: "row" }, names[is]!), ...row.map((n, taken) => cell(n, is, taken, total)));
    })),
  );
}

/** Returns the largest of each row. */
export function best(logits: Float32Array, classes: number): number[] {
  return Array.from({ length: logits.length / classes }, (_, i) => {
    const row = logits.subarray(i * classes, (i + 1) * classes);
    return row.indexOf(Math.max(...row));
  });
}
