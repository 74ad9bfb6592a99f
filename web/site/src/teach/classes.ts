import { attempt, make } from "../shell/dom.js";

/** Several files at once, of which some may be of no use. */

/** Does something with each file; one that fails does not keep the others from being taken. Gives what to say, and throws it if any failed. */
export async function eachFile(files: readonly File[], name: string, take: (file: File) => Promise<void>): Promise<string> {
  const reasons: string[] = [];
  for (const file of files) await take(file).catch((error: Error) => reasons.push(error.message));
  const taken = files.length - reasons.length;
  const said = `${taken} ${taken === 1 ? "picture" : "pictures"} more for ${name}.`;
  if (reasons.length) throw new Error(taken ? `${reasons.join("; ")}. ${said}` : reasons.join("; "));
  return said;
}

/** The classes of a person: names, examples, and the list of them in the page. */

const SHOWN = 12;
const COLORS = 6;

export interface Example {
  readonly picture: ImageData;
  readonly features: Float32Array;
}

export interface Class {
  readonly color: number;
  name: string;
  examples: Example[];
}

/** What the list asks the page to do. */
export interface Deeds {
  /** Starts to take examples for a class; gives what ends it. */
  readonly record: (into: Class) => () => void;
  readonly files: (into: Class, files: readonly File[]) => Promise<void>;
  readonly changed: () => void;
}

export class ClassList {
  classes: Class[] = [];
  /** Whether examples are taken from a stream, or from files. */
  streaming = false;
  readonly #place: HTMLElement;
  readonly #deeds: Deeds;
  #made = 0;

  constructor(place: HTMLElement, deeds: Deeds) {
    this.#place = place;
    this.#deeds = deeds;
  }

  add(name = `Class ${this.#made + 1}`): Class {
    const fresh: Class = { color: this.#made++ % COLORS, name, examples: [] };
    this.classes.push(fresh);
    this.draw();
    return fresh;
  }

  /** Forgets all classes. */
  clear(): void {
    [this.classes, this.#made] = [[], 0];
    this.draw();
  }

  /** Shows the list anew. */
  draw(): void {
    this.#place.replaceChildren(...this.classes.map((c) => this.#item(c)));
    this.#deeds.changed();
  }

  /** Shows the newest examples of a class, without touching what may have the focus. */
  refresh(which: Class): void {
    const item = this.#place.children[this.classes.indexOf(which)];
    item?.querySelector(".strip")!.replaceChildren(...which.examples.slice(-SHOWN).reverse().map((e) => thumbnail(e.picture)));
    item?.querySelector(".count")!.replaceChildren(count(which));
    this.#deeds.changed();
  }

  #item(which: Class): HTMLLIElement {
    const name = make("input", { type: "text", value: which.name, maxLength: 30, "aria-label": `Name of class ${this.classes.indexOf(which) + 1}`, onchange: () => {
      which.name = name.value.trim() || which.name;
      name.value = which.name;
      // In place: what is drawn anew loses the focus of who goes on typing.
      label();
      this.#deeds.changed();
    } });
    const remove = make("button", { type: "button", className: "quiet", onclick: () => {
      this.classes = this.classes.filter((c) => c !== which);
      this.draw();
    } }, "Remove");
    const clear = make("button", { type: "button", className: "quiet", onclick: () => {
      which.examples = [];
      this.refresh(which);
    } }, "Forget");
    const source = this.streaming ? this.#recorder(which) : this.#chooser(which);
    const label = () => {
      remove.setAttribute("aria-label", `Remove ${which.name}`);
      clear.setAttribute("aria-label", `Forget the examples of ${which.name}`);
      const words = this.streaming ? `Record examples of ${which.name}: hold, or press a key for two seconds` : `Pictures of ${which.name}`;
      (source.querySelector("input") ?? source).setAttribute("aria-label", words);
    };
    label();
    return make("li", { "data-color": which.color },
      make("div", { className: "name" }, name, remove),
      make("div", { className: "strip", "aria-hidden": "true" }, ...which.examples.slice(-SHOWN).reverse().map((e) => thumbnail(e.picture))),
      make("div", { className: "row" }, source, clear, make("span", { className: "count" }, count(which))),
    );
  }

  /** A button to hold; by keyboard, one press records for two seconds. */
  #recorder(which: Class): HTMLButtonElement {
    let end: (() => void) | undefined;
    const start = () => {
      if (end) return;
      button.setAttribute("aria-pressed", "true");
      const stop = this.#deeds.record(which);
      end = () => {
        stop();
        end = undefined;
        button.setAttribute("aria-pressed", "false");
      };
    };
    const button = make("button", { type: "button", className: "record", "aria-pressed": "false" }, "Hold to record");
    button.addEventListener("pointerdown", (event) => {
      button.setPointerCapture(event.pointerId);
      start();
    });
    for (const kind of ["pointerup", "pointercancel"] as const) button.addEventListener(kind, () => end?.());
    button.addEventListener("contextmenu", (event) => event.preventDefault());
    button.addEventListener("click", (event) => {
      // A click without a pointer is a key or a screen reader.
      if (event.detail !== 0) return;
      start();
      setTimeout(() => end?.(), 2000);
    });
    return button;
  }

  #chooser(which: Class): HTMLLabelElement {
    const input = make("input", { type: "file", accept: "image/*", multiple: true, className: "visually-hidden", onchange: () => void attempt(async () => {
      const files = [...(input.files ?? [])];
      input.value = ""; // the same files may be chosen again
      await this.#deeds.files(which, files);
    }) });
    return make("label", { className: "button" }, "Add pictures", input);
  }
}

const count = (which: Class): string => `${which.examples.length} ${which.examples.length === 1 ? "example" : "examples"}`;

function thumbnail(picture: ImageData): HTMLCanvasElement {
  const canvas = make("canvas", { width: picture.width, height: picture.height });
  canvas.getContext("2d")!.putImageData(picture, 0, 0);
  return canvas;
}
