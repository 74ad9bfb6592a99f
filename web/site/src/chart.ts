import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

/** Loss and accuracy over steps. */
export class Chart {
  #steps: number[] = [];
  #loss: number[] = [];
  #accuracy: (number | null)[] = [];
  readonly #plot: uPlot;

  constructor(place: HTMLElement) {
    const color = () => getComputedStyle(document.body).color;
    const axis = { stroke: color, grid: { stroke: "#8884" }, ticks: { stroke: "#8884" } };
    const size = () => ({ width: Math.max(place.clientWidth, 240), height: 220 });
    this.#plot = new uPlot(
      {
        ...size(),
        scales: { x: { time: false }, "%": { range: [0, 1] } },
        axes: [axis, { ...axis, label: "loss" }, { ...axis, scale: "%", side: 1, grid: { show: false }, label: "accuracy" }],
        series: [
          { label: "step" },
          { label: "loss", stroke: "#3366cc" },
          { label: "accuracy", stroke: "#2a9d5c", scale: "%", spanGaps: true, width: 2 },
        ],
      },
      [[], [], []],
      place,
    );
    addEventListener("resize", () => this.#plot.setSize(size()));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#plot.redraw());
  }

  add(step: number, loss: number, accuracy: number | undefined): void {
    this.#steps.push(step);
    this.#loss.push(loss);
    this.#accuracy.push(accuracy ?? null);
  }

  draw(): void {
    this.#plot.setData([this.#steps, this.#loss, this.#accuracy]);
  }

  clear(): void {
    [this.#steps, this.#loss, this.#accuracy] = [[], [], []];
    this.draw();
  }
}
