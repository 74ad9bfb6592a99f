import sonnets from "./sonnets.txt?raw";
import { Trainer } from "onnxtrain";
import { Alphabet, CHARACTERS, choose, countOf, LENGTH, pieces } from "./characters.js";
import { program, python } from "./code.js";
import { Chart } from "../shell/chart.js";
import { codePanel } from "../shell/code-panel.js";
import { $, attempt, fail, make, say, show, siteFile, text } from "../shell/dom.js";

/** The settings of the page, and the link that holds them. */

const NAMES = ["temperature", "rate", "begin", "device"] as const;
/** A link with a longer text is one that programs cut off. */
const LONGEST = 6000;

/** Sets what the address says after its `#`; gives the text to learn, if it has one. */
export function fromLink(hash: string): string | undefined {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  for (const name of NAMES) {
    const field = $<HTMLInputElement | HTMLSelectElement>(name);
    const value = given.get(name);
    if (value === null) continue;
    const before = field.value;
    field.value = value;
    // What is no choice of a list leaves it empty.
    if (field.value === "" && value !== "") field.value = before;
  }
  return given.get("text") ?? undefined;
}

/** Returns the address of this page with its settings. */
export function toLink(withText: boolean): string {
  const values = new URLSearchParams(NAMES.map((name) => [name, text(name)]));
  if (withText) {
    if (text("source").length > LONGEST) throw new Error(`the text has ${text("source").length} characters, a link holds ${LONGEST}`);
    values.set("text", text("source"));
  }
  return `${location.href.replace(/#.*/, "")}#${values}`;
}

/** A character model learns a text and types what it knows. */

/** Rows of a batch, steps until the full rate, and characters typed after each step. */
const ROWS = 16;
const WARM = 20;
const TYPED = 4;
/** After these steps a sample is kept, so long; and how much of what was typed stays on the paper. */
const KEPT = new Set([1, 25, 50, 100, 200, 400, 800, 1600, 3200]);
const SAMPLE = 90;
const ON_PAPER = 1600;

const source = $<HTMLTextAreaElement>("source");
const chart = new Chart($("chart"), [{ label: "loss" }], { height: 170 });
let trainer: Trainer | undefined;
let alphabet = new Alphabet(sonnets);
let written: number[] = [];
/** Counts the runs: a loop that is not of the newest one ends. */
let run = 0;
let goOn: (() => void) | undefined;
let paused = false;

const device = () => text("device") as "wasm" | "webgpu";
const begin = () => (text("begin") ? [...text("begin")] : ["\n"]).join("");

function aboutSource(): void {
  const kinds = new Set(source.value).size;
  const rare = kinds > CHARACTERS - 1 ? `; the ${kinds - CHARACTERS + 1} rarest are shown as \u25a1` : "";
  show("about-source", `${countOf(source.value).toLocaleString("en")} characters, ${kinds} of them different${rare}.`);
}

/** Opens a fresh model; the old one goes. */
async function open(): Promise<Trainer> {
  await trainer?.dispose();
  trainer = undefined;
  say("Loading ONNX Runtime and the model ...");
  return (trainer = await Trainer.create({ artifacts: siteFile("art/writer/"), device: device(), onMessage: say }));
}

/** Returns the next character's number. */
async function next(model: Trainer, before: readonly number[]): Promise<number> {
  const last = before.slice(-LENGTH);
  const ids = new BigInt64Array(LENGTH);
  last.forEach((n, i) => (ids[i] = BigInt(n)));
  const { logits } = await model.predict({ ids });
  const row = (logits!.data as Float32Array).subarray((last.length - 1) * CHARACTERS, last.length * CHARACTERS);
  return choose(row, alphabet.characters.length, Number(text("temperature")));
}

async function type(model: Trainer, count: number): Promise<void> {
  for (let i = 0; i < count; i++) written.push(await next(model, written));
  const shown = written.slice(-ON_PAPER).map((n) => alphabet.decode(n)).join("").replace(/^\n/, "");
  show("typed", shown);
  $("paper").scrollTop = $("paper").scrollHeight;
}

/** Keeps what the model writes at this step, below the steps before. */
async function keep(model: Trainer, step: number): Promise<void> {
  const sample = alphabet.encode(begin());
  const start = sample.length;
  for (let i = 0; i < SAMPLE; i++) sample.push(await next(model, sample));
  const words = sample.slice(text("begin") ? 0 : start).map((n) => alphabet.decode(n)).join("").trim();
  $("samples-note").hidden = true;
  $("samples").append(make("li", {}, make("span", { className: "when" }, step === 1 ? "first step" : `${step} steps`), make("q", {}, words)));
}

function paint(step: number, loss: number, rate: number): void {
  show("loss", loss.toFixed(2));
  // A guess among so many equally likely characters would be as good.
  show("choices", `${Math.max(1, Math.exp(loss)).toFixed(1)} signs`);
  show("steps", String(step));
  show("speed", rate ? Math.round(rate).toLocaleString("en") : "–");
}

async function learn(model: Trainer, mine: number, numbers: readonly number[]): Promise<void> {
  let mean: number | undefined;
  let [reading, read] = [0, 0];
  $("paper").setAttribute("aria-busy", "true");
  for (let step = 1; mine === run; step++) {
    model.learningRate = Number(text("rate")) * Math.min(1, step / WARM);
    const start = performance.now();
    const { loss, updated } = await model.step(pieces(numbers, ROWS));
    if (mine !== run) return;
    if (!updated) throw new Error(`the loss is ${loss} at step ${step}: start again with a smaller learning rate`);
    reading = 0.9 * reading + (performance.now() - start);
    read = 0.9 * read + ROWS * LENGTH;
    mean = mean === undefined ? loss : 0.9 * mean + 0.1 * loss;
    chart.add(step, mean);
    if (step === 1) say(`It learns, on ${model.device}.`);
    if (KEPT.has(step)) await keep(model, step);
    await type(model, TYPED);
    if (mine !== run) return;
    if (step % 5 === 0 || step === 1) {
      paint(step, mean, (1000 * read) / reading);
      chart.draw();
    }
    if (paused) await rest(step, mean, (1000 * read) / reading);
  }
}

/** Waits until it may go on; what is shown meanwhile is how things are after this step. */
async function rest(step: number, loss: number, rate: number): Promise<void> {
  paint(step, loss, rate);
  chart.draw();
  $("paper").setAttribute("aria-busy", "false");
  say(`Paused after ${step} ${step === 1 ? "step" : "steps"}. What it typed can be read now.`);
  await new Promise<void>((resolve) => (goOn = resolve));
  $("paper").setAttribute("aria-busy", "true");
}

/** Learns the text that is in the field, from the beginning. */
async function start(): Promise<void> {
  const count = countOf(source.value);
  if (count <= LENGTH) throw new Error(`the text has ${count} characters, the model reads pieces of ${LENGTH}: give it more`);
  const mine = ++run;
  $<HTMLButtonElement>("pause").disabled = true;
  if (paused) pause();
  const model = await open();
  if (mine !== run) return;
  alphabet = new Alphabet(source.value);
  written = alphabet.encode(begin());
  chart.clear();
  $("samples").replaceChildren();
  $("samples-note").hidden = false;
  show("typed", "");
  $<HTMLButtonElement>("pause").disabled = false;
  $("start").textContent = "Start again";
  $("start").classList.remove("primary");
  try {
    await learn(model, mine, alphabet.encode(source.value));
  } catch (error) {
    // What is closed while it works says so; another run has begun.
    if (mine !== run) return;
    $<HTMLButtonElement>("pause").disabled = true;
    throw error;
  }
}

function pause(): void {
  paused = !paused;
  show("pause", paused ? "Go on" : "Pause");
  // It rests after the step that is under way, and says so then.
  say(paused ? "It finishes this step ..." : `It learns, on ${trainer?.device ?? device()}.`);
  if (!paused) goOn?.();
}

function changed(): void {
  aboutSource();
  $("start").textContent = "Learn this text";
  $("start").classList.add("primary");
}

function setText(words: string): void {
  source.value = words.replace(/\r\n?/g, "\n");
  changed();
}

const again = () => attempt(start);
$("start").onclick = () => void again();
$("pause").onclick = pause;
$("device").onchange = () => void again();
$("sonnets").onclick = () => setText(sonnets);
source.oninput = changed;
$<HTMLInputElement>("file").onchange = (event) => void attempt(async () => {
  const file = (event.target as HTMLInputElement).files?.[0];
  if (file) setText(await file.text());
});
$("begin").onchange = () => (written = alphabet.encode(begin()));
$("temperature").oninput = () => {
  show("temperature-shown", text("temperature"));
  panel.refresh();
};
$("rate").onchange = () => panel.refresh();
$("share").onclick = () => void attempt(async () => {
  const link = toLink($<HTMLInputElement>("with-text").checked);
  history.replaceState(null, "", link);
  await navigator.clipboard.writeText(link).then(
    () => show("share", "Copied"),
    () => show("share", "It is in the address bar now"),
  );
  setTimeout(() => show("share", "Copy a link to these settings"), 2500);
});

const panel = codePanel($("code"), {
  note: "The page does this and shows what comes out. The artifacts are built once, by the Python beside it.",
  listings: [
    { name: "write.js", text: () => program(text("rate"), text("temperature"), text("device")) },
    { name: "build_writer.py", text: () => python },
  ],
  products: [
    { name: "writer.onnx", about: "the model as it is now; ids [batch, 64] to logits [batch, 64, 128]", bytes: () => trained().exportModel() },
    { name: "characters.json", about: "which number is which character", bytes: () => new TextEncoder().encode(JSON.stringify(alphabet.characters)) },
  ],
});

function trained(): Trainer {
  if (!trainer) throw new Error("there is no model yet");
  return trainer;
}

setText(fromLink(location.hash) ?? sonnets);
show("temperature-shown", text("temperature"));
panel.refresh();
$<HTMLButtonElement>("start").disabled = false;
void again().catch(fail);
