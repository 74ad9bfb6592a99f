import sonnets from "./sonnets.txt?raw";
import { Trainer } from "onnxtrain";
import { Vocabulary, CHARACTERS, sampleId, countOf, LENGTH, randomSequences } from "./characters.js";
import { program, python } from "./code.js";
import { Chart } from "../shell/chart.js";
import { codePanel } from "../shell/code-panel.js";
import { $, attempt, fail, make, say, show, siteFile, text } from "../shell/dom.js";

const NAMES = ["temperature", "rate", "begin", "device"] as const;
/** Maximum length of a text in a link: many programs truncate longer URLs. */
const MAX_LINK_TEXT = 6000;

/** Applies the settings in a URL fragment; returns the training text, if it contains one. */
export function fromLink(hash: string): string | undefined {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  for (const name of NAMES) {
    const field = $<HTMLInputElement | HTMLSelectElement>(name);
    const value = given.get(name);
    if (value === null) continue;
    const before = field.value;
    field.value = value;
    // An unknown value leaves a select element empty.
    if (field.value === "" && value !== "") field.value = before;
  }
  return given.get("text") ?? undefined;
}

/** Returns the URL of this page with its settings. */
export function toLink(withText: boolean): string {
  const values = new URLSearchParams(NAMES.map((name) => [name, text(name)]));
  if (withText) {
    if (text("source").length > MAX_LINK_TEXT) throw new Error(`the text has ${text("source").length} characters; a link can contain at most ${MAX_LINK_TEXT}`);
    values.set("text", text("source"));
  }
  return `${location.href.replace(/#.*/, "")}#${values}`;
}


/** Batch size, warmup steps, and characters generated after each step. */
const BATCH_SIZE = 16;
const WARMUP_STEPS = 20;
const CHARACTERS_PER_STEP = 4;
/** Steps after which a sample is shown, its length, and the maximum length of the displayed text. */
const SAMPLE_STEPS = new Set([1, 25, 50, 100, 200, 400, 800, 1600, 3200]);
const SAMPLE_LENGTH = 90;
const DISPLAY_LENGTH = 1600;

const TOO_SHORT = `The text must have more than ${LENGTH} characters`;

const source = $<HTMLTextAreaElement>("source");
const chart = new Chart($("chart"), [{ label: "loss" }], { height: 170 });
let trainer: Trainer | undefined;
let vocabulary = new Vocabulary(sonnets);
let generated: number[] = [];
/** Number of the newest run: loops of older runs end. */
let run = 0;
let resume: (() => void) | undefined;
let paused = false;

const device = () => text("device") as "wasm" | "webgpu";
const begin = () => (text("begin") ? [...text("begin")] : ["\n"]).join("");

function aboutSource(): void {
  const distinct = new Set(source.value).size;
  const unknown = distinct > CHARACTERS - 1 ? `; the ${distinct - CHARACTERS + 1} rarest are shown as \u25a1` : "";
  show("about-source", `${countOf(source.value).toLocaleString("en")} characters, ${distinct} of them distinct${unknown}.`);
}

/** Creates a trainer with initial weights and disposes the old one. */
async function open(): Promise<Trainer> {
  await trainer?.dispose();
  trainer = undefined;
  say("Loading ONNX Runtime and the model ...");
  return (trainer = await Trainer.create({ artifacts: siteFile("art/writer/"), device: device(), onMessage: say }));
}

/** Generates the id of the next character. */
async function nextId(model: Trainer, before: readonly number[]): Promise<number> {
  const last = before.slice(-LENGTH);
  const ids = new BigInt64Array(LENGTH);
  last.forEach((n, i) => (ids[i] = BigInt(n)));
  const { logits } = await model.predict({ ids });
  const row = (logits!.data as Float32Array).subarray((last.length - 1) * CHARACTERS, last.length * CHARACTERS);
  return sampleId(row, vocabulary.characters.length, Number(text("temperature")));
}

async function generate(model: Trainer, count: number): Promise<void> {
  for (let i = 0; i < count; i++) generated.push(await nextId(model, generated));
  const shown = generated.slice(-DISPLAY_LENGTH).map((n) => vocabulary.decode(n)).join("").replace(/^\n/, "");
  show("typed", shown);
  $("paper").scrollTop = $("paper").scrollHeight;
}

/** Adds a sample of this step to the page. */
async function addSample(model: Trainer, step: number): Promise<void> {
  const sample = vocabulary.encode(begin());
  const start = sample.length;
  for (let i = 0; i < SAMPLE_LENGTH; i++) sample.push(await nextId(model, sample));
  const sampleText = sample.slice(text("begin") ? 0 : start).map((n) => vocabulary.decode(n)).join("").trim();
  $("samples-note").hidden = true;
  $("samples").append(make("li", {}, make("span", { className: "when" }, step === 1 ? "first step" : `${step} steps`), make("q", {}, sampleText)));
}

function showMetrics(step: number, loss: number, rate: number): void {
  show("loss", loss.toFixed(2));

  show("choices", Math.max(1, Math.exp(loss)).toFixed(1));
  show("steps", String(step));
  show("speed", rate ? Math.round(rate).toLocaleString("en") : "–");
}

async function learn(model: Trainer, mine: number, tokens: readonly number[]): Promise<void> {
  let mean: number | undefined;
  let [trainingTime, characters] = [0, 0];
  $("paper").setAttribute("aria-busy", "true");
  for (let step = 1; mine === run; step++) {
    model.learningRate = Number(text("rate")) * Math.min(1, step / WARMUP_STEPS);
    const start = performance.now();
    const { loss, updated } = await model.step(randomSequences(tokens, BATCH_SIZE));
    if (mine !== run) return;
    if (!updated) throw new Error(`the loss is ${loss} at step ${step}: restart with a smaller learning rate`);
    trainingTime = 0.9 * trainingTime + (performance.now() - start);
    characters = 0.9 * characters + BATCH_SIZE * LENGTH;
    mean = mean === undefined ? loss : 0.9 * mean + 0.1 * loss;
    chart.add(step, mean);
    if (step === 1) say(`Training on ${model.device}.`);
    if (SAMPLE_STEPS.has(step)) await addSample(model, step);
    await generate(model, CHARACTERS_PER_STEP);
    if (mine !== run) return;
    if (step % 5 === 0 || step === 1) {
      showMetrics(step, mean, (1000 * characters) / trainingTime);
      chart.draw();
    }
    if (paused) await waitWhilePaused(step, mean, (1000 * characters) / trainingTime);
  }
}

/** Waits while training is paused and shows the state after this step. */
async function waitWhilePaused(step: number, loss: number, rate: number): Promise<void> {
  showMetrics(step, loss, rate);
  chart.draw();
  $("paper").setAttribute("aria-busy", "false");
  say(`Paused after ${step} ${step === 1 ? "step" : "steps"}.`);
  await new Promise<void>((resolve) => (resume = resolve));
  $("paper").setAttribute("aria-busy", "true");
}

/** Trains on the text in the text area, from initial weights. */
async function start(): Promise<void> {
  const count = countOf(source.value);
  if (count <= LENGTH) throw new Error(`${TOO_SHORT}, got ${count}`);
  const mine = ++run;
  $<HTMLButtonElement>("pause").disabled = true;
  if (paused) pause();
  const model = await open();
  if (mine !== run) return;
  vocabulary = new Vocabulary(source.value);
  generated = vocabulary.encode(begin());
  chart.clear();
  $("samples").replaceChildren();
  $("samples-note").hidden = false;
  show("typed", "");
  $<HTMLButtonElement>("pause").disabled = false;
  $("start").textContent = "Restart";
  $("start").classList.remove("primary");
  try {
    await learn(model, mine, vocabulary.encode(source.value));
  } catch (error) {
    // Ignore the error of a trainer that was disposed because another run started.
    if (mine !== run) return;
    $<HTMLButtonElement>("pause").disabled = true;
    throw error;
  }
}

function pause(): void {
  paused = !paused;
  show("pause", paused ? "Resume" : "Pause");
  // Training pauses after the current step, which then updates the status.
  say(paused ? "Pausing after this step ..." : `Training on ${trainer?.device ?? device()}.`);
  if (!paused) resume?.();
}

function changed(): void {
  aboutSource();
  $("start").textContent = "Train on this text";
  $("start").classList.add("primary");
  const short = countOf(source.value) <= LENGTH;
  $<HTMLButtonElement>("start").disabled = short;
  if (short) say(`${TOO_SHORT}, got ${countOf(source.value)}.${trainer ? " The model keeps the previous text." : ""}`);
  else if ($("status").textContent!.startsWith(TOO_SHORT)) say('Press "Train on this text".');
}

function setText(text: string): void {
  source.value = text.replace(/\r\n?/g, "\n");
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
$("begin").onchange = () => (generated = vocabulary.encode(begin()));
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
    () => show("share", "Copied to the address bar"),
  );
  setTimeout(() => show("share", "Copy link to these settings"), 2500);
});

const panel = codePanel($("code"), {
  note: "The page runs the first program. The second one builds the artifacts.",
  listings: [
    { name: "write.js", text: () => program(text("rate"), text("temperature"), text("device")) },
    { name: "build_writer.py", text: () => python },
  ],
  products: [
    { name: "writer.onnx", about: "the current model: ids [batch, 64] -> logits [batch, 64, 128]", bytes: () => trained().exportModel() },
    { name: "characters.json", about: "the characters by id", bytes: () => new TextEncoder().encode(JSON.stringify(vocabulary.characters)) },
  ],
});

function trained(): Trainer {
  if (!trainer) throw new Error("the model is not loaded yet");
  return trainer;
}

setText(fromLink(location.hash) ?? sonnets);
show("temperature-shown", text("temperature"));
panel.refresh();
$<HTMLButtonElement>("start").disabled = countOf(source.value) <= LENGTH;
void again().catch(fail);
