import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import "./chart.css";
import { make } from "./dom.js";
import { color, onTheme } from "./theme.js";

/** A series of a chart. */
export interface Line {
  readonly label: string;
  /** A color variable of style.css. Default: the accent color. */
  readonly color?: string;
  /** Values from 0 to 1, with their own axis on the right. */
  readonly share?: boolean;
  /** Connect values across missing ones. */
  readonly sparse?: boolean;
}

/** Maximum number of points; above it every other point is dropped. */
const MAX_POINTS = 1600;

/** Line chart over steps, drawn with uPlot: `new Chart(element, [{ label: "loss" }])`. */
export class Chart {
  #rows: (number | null)[][];
  readonly #lines: readonly Line[];
  readonly #plot: uPlot;
  readonly #place: HTMLElement;
  #every = 1;
  #seen = 0;

  constructor(place: HTMLElement, lines: readonly Line[], options: { height?: number; x?: string } = {}) {
    this.#place = place;
    this.#lines = lines;
    this.#rows = [[], ...lines.map(() => [])];
    place.classList.add("chart");
    place.setAttribute("role", "img");
    const size = () => ({ width: Math.max(place.clientWidth - 2, 200), height: options.height ?? 200 });
    const axis = {
      stroke: () => color("--quiet"), font: "12px Inter, system-ui, sans-serif",
      grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false },
    };
    this.#plot = new uPlot(
      {
        ...size(),
        cursor: { y: false, points: { size: 7 } },
        legend: { show: false },
        scales: { x: { time: false }, y: { range: (_, low, high) => [Math.min(0, low), (high || 1) * 1.05] }, share: { range: [0, 1] } },
        axes: [
          { ...axis, size: 28, grid: { show: false } },
          { ...axis, size: 46 },
          ...(lines.some((l) => l.share)
            ? [{ ...axis, scale: "share", side: 1, size: 46, grid: { show: false }, values: (_: unknown, ticks: number[]) => ticks.map((v) => `${Math.round(100 * v)} %`) } as uPlot.Axis]
            : []),
        ],
        series: [
          { label: options.x ?? "step" },
          ...lines.map((l): uPlot.Series => ({
            label: l.label, stroke: () => color(l.color ?? "--accent"), width: 2, spanGaps: l.sparse ?? false,
            points: { show: false }, scale: l.share ? "share" : "y",
            value: (_, v) => (v === null || v === undefined ? "–" : l.share ? `${(100 * v).toFixed(1)} %` : v.toPrecision(3)),
          })),
        ],
      },
      this.#rows as uPlot.AlignedData,
      place,
    );
    place.append(make("ul", { className: "legend", "aria-hidden": true }, ...lines.map((l) => {
      const key = make("span", { className: "key" });
      key.style.background = `var(${l.color ?? "--accent"})`;
      return make("li", {}, key, l.label);
    })));
    new ResizeObserver(() => this.#plot.setSize(size())).observe(place);
    onTheme(() => this.#plot.redraw());
    this.draw();
  }

  /** Adds the values of a step, one per line; `null` or `undefined` for missing values. */
  add(step: number, ...values: (number | null | undefined)[]): void {
    // Values of sparse lines are never dropped.
    const sparse = this.#lines.some((l, i) => l.sparse && values[i] !== null && values[i] !== undefined);
    if (this.#seen++ % this.#every && !sparse) return;
    this.#rows[0]!.push(step);
    this.#lines.forEach((_, i) => this.#rows[i + 1]!.push(values[i] ?? null));
    if (this.#rows[0]!.length < MAX_POINTS) return;
    this.#every *= 2;
    const keep = this.#rows[0]!.map((_, r) => r % 2 === 0 || this.#lines.some((l, i) => l.sparse && this.#rows[i + 1]![r] !== null));
    this.#rows = this.#rows.map((row) => row.filter((_, r) => keep[r]));
  }

  /** Redraws the chart. */
  draw(): void {
    this.#plot.setData(this.#rows as uPlot.AlignedData);
    const last = this.#lines.map((l, i) => {
      const value = this.#rows[i + 1]!.findLast((v) => v !== null);
      return `${l.label} ${value === undefined || value === null ? "not available yet" : l.share ? `${(100 * value).toFixed(1)} %` : value.toPrecision(3)}`;
    });
    this.#place.setAttribute("aria-label", `Chart over ${this.#rows[0]!.at(-1) ?? 0} steps: ${last.join(", ")}`);
  }

  clear(): void {
    this.#rows = this.#rows.map(() => []);
    [this.#every, this.#seen] = [1, 0];
    this.draw();
  }
}
