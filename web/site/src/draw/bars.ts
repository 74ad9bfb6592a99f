/** How sure the net is of each class, as bars. */
import { $, make } from "../shell/dom.js";

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
