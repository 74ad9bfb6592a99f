/** A run that a person watches: numbers, chart, Pause and Stop (`#pause`, `#stop`, `#loss`, `#accuracy`, ...). */
import type { Dataset, Schedule, Trainer } from "onnxtrain";
import type { Chart } from "./chart.js";
import { $, fail, say, show } from "./dom.js";

/** How often numbers and chart change, in ms. */
const NUMBERS = 100;

/** What is trained, and how. */
export interface Plan {
  readonly trainer: Trainer;
  readonly rows: Dataset;
  readonly test: Dataset;
  readonly epochs: number;
  readonly batchSize: number;
  readonly schedule: Schedule;
  /** How long a step takes at least, in ms, so that one can watch; as fast as it can unless given. */
  readonly pace?: number | undefined;
  /** Called now and then, and at the end of every epoch, to show more. */
  readonly look?: (epochEnds: boolean) => Promise<void>;
  /** What is said at the end, before the count of steps. */
  readonly done?: string;
}

const wait = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms));

export class Run {
  readonly #chart: Chart;
  readonly #changed: (running: boolean) => void;
  #stop: AbortController | undefined;
  #ended: Promise<void> = Promise.resolve();
  #paused = false;
  #resume: () => void = () => undefined;

  /** `changed` is told when a run begins and ends, to disable what makes no sense then. */
  constructor(chart: Chart, changed: (running: boolean) => void) {
    this.#chart = chart;
    this.#changed = changed;
    $("pause").onclick = () => this.pause(!this.#paused);
    $("stop").onclick = () => void this.stop();
    this.#show(false);
  }

  get running(): boolean {
    return this.#stop !== undefined;
  }

  pause(on: boolean): void {
    this.#paused = on;
    show("pause", on ? "Resume" : "Pause");
    if (!on) this.#resume();
  }

  /** Ends a run; done when it has said its last word. */
  async stop(): Promise<void> {
    this.#stop?.abort();
    this.pause(false);
    await this.#ended;
  }

  /** Does work that ends with training; Pause and Stop count from here on. Another run is stopped. */
  async begin(work: (clicked: number) => Promise<void>): Promise<void> {
    const clicked = performance.now();
    if (this.#stop) return;
    this.#stop = new AbortController();
    this.#show(true);
    await (this.#ended = this.#do(() => work(clicked), this.#stop.signal));
  }

  async #do(work: () => Promise<void>, signal: AbortSignal): Promise<void> {
    try {
      await work();
    } catch (error) {
      if (signal.aborted) say("Stopped.");
      else fail(error);
    } finally {
      this.#stop = undefined;
      this.#show(false);
    }
  }

  #show(running: boolean): void {
    this.pause(false);
    for (const id of ["pause", "stop"]) $<HTMLButtonElement>(id).disabled = !running;
    this.#changed(running);
  }

  /** Trains, and shows how it goes. */
  async train(plan: Plan, clicked: number): Promise<void> {
    const { trainer, rows, test, epochs, batchSize, schedule, pace, look } = plan;
    const signal = this.#stop!.signal;
    this.#chart.clear();
    for (const id of ["loss", "accuracy", "speed", "eta"]) show(id, "–");
    const before = trainer.globalStep;
    const tell = (epoch: number) => say(`Epoch ${epoch} of ${epochs} on ${trainer.device}${before ? `, from step ${before}` : ""}.`);
    let [told, steps, next] = [1, 0, 0];
    let began = performance.now();
    tell(told);
    const numbers = (loss: number, total: number) => {
      const speed = (1000 * steps) / (performance.now() - began);
      show("loss", loss.toFixed(3));
      show("speed", speed.toFixed(0));
      show("eta", `${((total - steps) / speed).toFixed(0)} s`);
      this.#chart.draw();
    };
    const options = { epochs, batchSize, schedule, validation: test, signal, ...(pace ? { stepsPerCall: 1 } : {}) };
    for await (const m of trainer.fit(rows, options)) {
      const now = performance.now();
      if (++steps === 1) $("status").dataset["first"] = ((now - clicked) / 1000).toFixed(2);
      const { validation } = m;
      this.#chart.add(m.step, m.loss, validation && (validation["accuracy"] ?? validation.loss));
      if (m.epoch !== told) tell((told = m.epoch));
      if (now > next || validation) {
        numbers(m.loss, m.totalSteps!);
        if (validation) show("accuracy", validation["accuracy"] === undefined ? `loss ${validation.loss.toFixed(3)}` : `${(100 * validation["accuracy"]!).toFixed(1)} %`);
        await look?.(validation !== undefined);
        // Most of the time is for training, also where pictures take long.
        next = performance.now() + Math.max(NUMBERS, 2 * (performance.now() - now));
      }
      const ahead = began + (pace ?? 0) * steps - performance.now();
      if (ahead > 10) await wait(ahead);
      if (this.#paused) {
        const paused = performance.now();
        numbers(m.loss, m.totalSteps!);
        say("Paused.");
        await new Promise<void>((resolve) => (this.#resume = resolve));
        began += performance.now() - paused;
        if (!signal.aborted) tell(told);
      }
    }
    await look?.(true);
    say(`${plan.done ?? "Done"}: ${steps} steps in ${((performance.now() - began) / 1000).toFixed(1)} s on ${trainer.device}.`);
  }
}
