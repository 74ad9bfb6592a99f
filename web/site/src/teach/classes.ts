import { attempt, make } from "../shell/dom.js";

/** Calls `add` for every file, even if some fail. Returns a status message; throws it with the reasons if any file failed. */
export async function eachFile(files: readonly File[], name: string, add: (file: File) => Promise<void>): Promise<string> {
  const reasons: string[] = [];
  for (const file of files) await add(file).catch((error: Error) => reasons.push(error.message));
  const added = files.length - reasons.length;
  const message = `Added ${added} ${added === 1 ? "image" : "images"} to ${name}.`;
  if (reasons.length) throw new Error(added ? `${reasons.join("; ")}. ${message}` : reasons.join("; "));
  return message;
}

const SHOWN = 12;
const COLORS = 6;

export interface Example {
  readonly image: ImageData;
  readonly features: Float32Array;
}

export interface Class {
  readonly color: number;
  name: string;
  examples: Example[];
}

/** Callbacks of the class list. */
export interface ClassListCallbacks {
  /** Starts recording examples for a class; returns a function that stops. */
  readonly record: (into: Class) => () => void;
  readonly files: (into: Class, files: readonly File[]) => Promise<void>;
  readonly changed: () => void;
}

export class ClassList {
  classes: Class[] = [];
  /** Whether examples come from a stream or from files. */
  streaming = false;
  readonly #place: HTMLElement;
  readonly #callbacks: ClassListCallbacks;
  #created = 0;

  constructor(place: HTMLElement, callbacks: ClassListCallbacks) {
    this.#place = place;
    this.#callbacks = callbacks;
  }

  add(name = `Class ${this.#created + 1}`): Class {
    const fresh: Class = { color: this.#created++ % COLORS, name, examples: [] };
    this.classes.push(fresh);
    this.draw();
    return fresh;
  }

  /** Removes all classes. */
  clear(): void {
    [this.classes, this.#created] = [[], 0];
    this.draw();
  }

  /** Rebuilds the list. */
  draw(): void {
    this.#place.replaceChildren(...this.classes.map((c) => this.#item(c)));
    this.#callbacks.changed();
  }

  /** Updates the examples of a class without rebuilding elements that may have the focus. */
  refresh(item: Class): void {
    const element = this.#place.children[this.classes.indexOf(item)];
    element?.querySelector(".strip")!.replaceChildren(...item.examples.slice(-SHOWN).reverse().map((e) => thumbnail(e.image)));
    element?.querySelector(".count")!.replaceChildren(count(item));
    this.#callbacks.changed();
  }

  #item(item: Class): HTMLLIElement {
    const name = make("input", { type: "text", value: item.name, maxLength: 30, "aria-label": `Name of class ${this.classes.indexOf(item) + 1}`, onchange: () => {
      item.name = name.value.trim() || item.name;
      name.value = item.name;
      // Update in place: rebuilding the list would lose the focus.
      label();
      this.#callbacks.changed();
    } });
    const remove = make("button", { type: "button", className: "quiet", onclick: () => {
      this.classes = this.classes.filter((c) => c !== item);
      this.draw();
    } }, "Remove");
    const clear = make("button", { type: "button", className: "quiet", onclick: () => {
      item.examples = [];
      this.refresh(item);
    } }, "Clear");
    const source = this.streaming ? this.#recorder(item) : this.#chooser(item);
    const label = () => {
      remove.setAttribute("aria-label", `Remove ${item.name}`);
      clear.setAttribute("aria-label", `Clear the examples of ${item.name}`);
      const text = this.streaming ? `Record examples of ${item.name}: hold, or press a key for two seconds` : `Images of ${item.name}`;
      (source.querySelector("input") ?? source).setAttribute("aria-label", text);
    };
    label();
    return make("li", { "data-color": item.color },
      make("div", { className: "name" }, name, remove),
      make("div", { className: "strip", "aria-hidden": "true" }, ...item.examples.slice(-SHOWN).reverse().map((e) => thumbnail(e.image))),
      make("div", { className: "row" }, source, clear, make("span", { className: "count" }, count(item))),
    );
  }

  /** Creates a button that records while it is held; a key press records for two seconds. */
  #recorder(item: Class): HTMLButtonElement {
    let end: (() => void) | undefined;
    const start = () => {
      if (end) return;
      button.setAttribute("aria-pressed", "true");
      const stop = this.#callbacks.record(item);
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
      // A click with detail 0 comes from the keyboard or a screen reader.
      if (event.detail !== 0) return;
      start();
      setTimeout(() => end?.(), 2000);
    });
    return button;
  }

  #chooser(item: Class): HTMLLabelElement {
    const input = make("input", { type: "file", accept: "image/*", multiple: true, className: "visually-hidden", onchange: () => void attempt(async () => {
      const files = [...(input.files ?? [])];
      input.value = ""; // allows selecting the same files again
      await this.#callbacks.files(item, files);
    }) });
    return make("label", { className: "button" }, "Add images", input);
  }
}

const count = (item: Class): string => `${item.examples.length} ${item.examples.length === 1 ? "example" : "examples"}`;

function thumbnail(image: ImageData): HTMLCanvasElement {
  const canvas = make("canvas", { width: image.width, height: image.height });
  canvas.getContext("2d")!.putImageData(image, 0, 0);
  return canvas;
}
