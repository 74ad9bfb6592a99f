/** What the model says about rows that it was not trained on. */
import type { Trainer } from "onnxtrain";
import { $, make } from "../shell/dom.js";
import { rowsOf } from "./columns.js";
import { batchSpecs, rowCount, type Task } from "./task.js";

const SHOWN = 12;

/** Shows rows with what they are and what the model says. */
export async function showAnswers(trainer: Trainer, task: Task): Promise<void> {
  const specs = batchSpecs(task.artifacts);
  const count = Math.min(SHOWN, rowCount(task.test));
  const rows = rowsOf(task.test, 0, count);
  const inputs = specs.filter((t) => t.role === "input").map((t) => [t.name, rows[t.name]!] as const);
  const target = specs.find((t) => t.role === "target");
  const output = Object.values(await trainer.predict(Object.fromEntries(inputs)))[0];
  if (!output || !target || output.dims[0] !== count) return;
  const width = output.data.length / count;
  const words = task.fitted.words.get(target.name);
  const whole = /int/.test(target.dtype) && rows[target.name]!.data.length === count;
  const lines = Array.from({ length: count }, (_, r) => {
    const values = Array.from(output.data.subarray(r * width, (r + 1) * width), Number);
    const is = Number(rows[target.name]!.data[r * (rows[target.name]!.data.length / count)]);
    const says = whole ? values.indexOf(Math.max(...values)) : values[0]!;
    const name = (v: number) => (whole ? (words?.[v] ?? String(v)) : v.toPrecision(4));
    return make("tr", { className: whole ? (is === says ? "right" : "wrong") : "" },
      make("td", {}, String(r + 1)), make("td", {}, name(is)), make("td", {}, `${name(says)}${whole ? (is === says ? " ✓" : " ✗") : ""}`));
  });
  $("answers").hidden = false;
  $("answer-rows").replaceChildren(...lines);
}
