/** The settings of the page, as stored in the controls and the URL. */
import { MAX } from "./diagram.js";
import { palette } from "./field.js";
import type { Activation } from "./net.js";
import { drawPoints, SETS } from "./points.js";
import { $, make, text } from "../shell/dom.js";

export interface Settings {
  set: string;
  noise: number;
  count: number;
  hidden: number[];
  activation: Activation;
  rate: number;
  decay: number;
  batch: number;
  pace: number;
  /** Random seed of the points and the initial weights. */
  seed: number;
}

const FIELDS = ["activation", "rate", "decay", "batch", "noise", "count"] as const;
export const settings: Settings = {
  set: "spirals", noise: 0.05, count: 240, hidden: [8, 6], activation: "tanh", rate: 0.03, decay: 0, batch: 16, pace: 12, seed: 1,
};

/** Reads the settings from the URL; ignores invalid values. */
export function readUrl(): void {
  const given = new URLSearchParams(location.hash.slice(1));
  const set = given.get("set") ?? "";
  if (set in SETS) settings.set = set;
  const hidden = given.get("hidden");
  if (hidden !== null && /^\d?(-\d)*$/.test(hidden)) {
    settings.hidden = hidden.split("-").filter(Boolean).map((n) => Math.min(MAX.neurons, Math.max(1, Number(n)))).slice(0, MAX.layers);
  }
  const seed = Number(given.get("seed"));
  if (Number.isSafeInteger(seed) && seed > 0 && seed < 1e6) settings.seed = seed;
  for (const name of FIELDS) {
    const control = $<HTMLInputElement | HTMLSelectElement>(name);
    const before = String(settings[name]);
    control.value = given.get(name) ?? before;
    // A select element rejects unknown values.
    if (control.value === "") control.value = before;
  }
  const pace = document.querySelector<HTMLInputElement>(`[name=pace][value="${Number(given.get("pace"))}"]`);
  if (pace) pace.checked = true;
  readControls();
}

/** Reads the settings from the controls. */
export function readControls(): void {
  settings.activation = text("activation") as Activation;
  for (const name of ["rate", "decay", "batch", "noise", "count"] as const) settings[name] = Number(text(name));
  settings.pace = Number(document.querySelector<HTMLInputElement>("[name=pace]:checked")!.value);
  $("noise-shown").textContent = `${Math.round(200 * settings.noise)} %`;
  $("count-shown").textContent = String(settings.count);
}

/** Returns the URL of the page with the current settings. */
export function settingsUrl(): string {
  const { set, hidden, seed, pace } = settings;
  const given = new URLSearchParams({ set, hidden: hidden.join("-"), seed: String(seed), pace: String(pace) });
  for (const name of FIELDS) given.set(name, String(settings[name]));
  return `${location.href.split("#")[0]}#${given}`;
}

/** Shows the datasets as thumbnails. */
export function showSets(onSelect: (set: string) => void): void {
  $("sets").replaceChildren(...Object.entries(SETS).map(([id, { name, classes }]) => {
    const canvas = make("canvas", { width: 176, height: 176 });
    canvas.setAttribute("aria-hidden", "true");
    const pen = canvas.getContext("2d")!;
    const colors = palette(classes);
    pen.fillStyle = `rgb(${colors.paper.join()})`;
    pen.fillRect(0, 0, 176, 176);
    const { x, labels } = drawPoints(id, 90, 0.05, 7);
    for (let i = 0; i < labels.length; i++) {
      pen.fillStyle = `rgb(${colors.of[labels[i]!]!.join()})`;
      pen.beginPath();
      pen.arc(88 + 82 * x[2 * i]!, 88 - 82 * x[2 * i + 1]!, 5, 0, 2 * Math.PI);
      pen.fill();
    }
    const input = make("input", { type: "radio", name: "set", value: id, checked: id === settings.set, onchange: () => onSelect(id) });
    return make("label", {}, input, canvas, name);
  }));
}

/** Shows the class options for added points. */
export function showPens(classes: number): void {
  const names = ["blue", "orange", "green"];
  const before = Math.min(pen(), classes - 1);
  $("pens").replaceChildren(...Array.from({ length: classes }, (_, k) => make("label", {},
    make("input", { type: "radio", name: "pen", value: String(k), checked: k === before }),
    make("span", {}, make("span", { className: `swatch class-${k}` }), names[k]!))));
}

/** Returns the selected class for added points. */
export const pen = (): number => Number(document.querySelector<HTMLInputElement>("[name=pen]:checked")?.value ?? 0);

