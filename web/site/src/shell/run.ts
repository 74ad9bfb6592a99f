/** A training run with metrics, chart, Pause and Stop (`#pause`, `#stop`, `#loss`, `#accuracy`, ...). */
import type { Dataset, Schedule, Trainer } from "onnxtrain";
import type { Chart } from "./chart.js";
import { $, fail, say, show } from "./dom.js";

/** Interval between updates of metrics and chart, in ms. */
const UPDATE_INTERVAL = 100;

/** Trainer, data and options of a run. */
export interface Plan {
  readonly trainer: Trainer;
  readonly rows: Dataset;
  readonly test: Dataset;
  readonly epochs: number;
  readonly batchSize: number;
  readonly schedule: Schedule;
  /** Minimum duration of a step in ms, to slow training down. Default: maximum speed. */
  readonly pace?: number | undefined;
  /** Called regularly and at the end of every epoch, to update other parts of the page. */
  readonly update?: (epochEnds: boolean) => Promise<void>;
  /** Final message, shown before the number of steps. */
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

  /** `changed` is called when a run starts and ends, to enable and disable controls. */
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

  /** Stops a run; resolves after its last message. */
  async stop(): Promise<void> {
    this.#stop?.abort();
    this.pause(false);
    await this.#ended;
  }

  /** Starts a run: `work` prepares and trains. Pause and Stop are enabled from here on. Ignored while another run is active. */
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

  /** Trains and shows the progress. */
  async train(plan: Plan, clicked: number): Promise<void> {
    const { trainer, rows, test, epochs, batchSize, schedule, pace, update } = plan;
    const signal = this.#stop!.signal;
    this.#chart.clear();
    for (const id of ["loss", "accuracy", "speed", "eta"]) show(id, "–");
    const before = trainer.globalStep;
    const reportEpoch = (epoch: number) => say(`Epoch ${epoch} of ${epochs} on ${trainer.device}${before ? `, from step ${before}` : ""}.`);
    let [epoch, steps, next] = [1, 0, 0];
    let start = performance.now();
    reportEpoch(epoch);
    const showMetrics = (loss: number, total: number) => {
      const speed = (1000 * steps) / (performance.now() - start);
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
      if (m.epoch !== epoch) reportEpoch((epoch = m.epoch));
      if (now > next || validation) {
        showMetrics(m.loss, m.totalSteps!);
        if (validation) show("accuracy", validation["accuracy"] === undefined ? `loss ${validation.loss.toFixed(3)}` : `${(100 * validation["accuracy"]!).toFixed(1)} %`);
        await update?.(validation !== undefined);
        // Spend most of the time on training, even if updating the page is slow.
        next = performance.now() + Math.max(UPDATE_INTERVAL, 2 * (performance.now() - now));
      }
      const ahead = start + (pace ?? 0) * steps - performance.now();
      if (ahead > 10) await wait(ahead);
      if (this.#paused) {
        const paused = performance.now();
        showMetrics(m.loss, m.totalSteps!);
        say("Paused.");
        await new Promise<void>((resolve) => (this.#resume = resolve));
        start += performance.now() - paused;
        if (!signal.aborted) reportEpoch(epoch);
      }
    }
    await update?.(true);
    say(`${plan.done ?? "Done"}: ${steps} steps in ${((performance.now() - start) / 1000).toFixed(1)} s on ${trainer.device}.`);
  }
}
