/** "Here is the code that did this": the program behind a page, and the files that it made. */
import "./code-panel.css";
import { attempt, download, make } from "./dom.js";

/** A program that the person may read, copy and take along; it may depend on settings. */
export interface Listing {
  readonly name: string;
  readonly text: () => string;
}

/** A file that is made when it is asked for: a model, a checkpoint. */
export interface Product {
  readonly name: string;
  readonly about?: string;
  readonly bytes: () => Promise<Uint8Array> | Uint8Array;
}

/** Fills `place` with the panel; `refresh()` writes the listings anew. */
export function codePanel(
  place: HTMLElement, options: { listings: readonly Listing[]; products?: readonly Product[]; note?: string },
): { refresh(): void } {
  const { listings, products = [] } = options;
  const code = make("code");
  const pre = make("pre", { tabIndex: 0, "aria-label": "The code" }, code);
  let shown = listings[0]!;
  const picks = listings.map((l) => make("button", { type: "button", className: "pick", onclick: () => pick(l) }, l.name));
  const copied = make("span", { className: "copied", role: "status" });
  const copy = make("button", { type: "button", className: "quiet", onclick: () => void attempt(async () => {
    await navigator.clipboard.writeText(shown.text());
    copied.textContent = "Copied.";
    setTimeout(() => (copied.textContent = ""), 2000);
  }) }, "Copy");
  const take = make("button", { type: "button", className: "quiet", onclick: () => download(shown.name, shown.text()) }, "Download");
  const refresh = () => {
    code.textContent = shown.text();
    listings.forEach((l, i) => picks[i]!.setAttribute("aria-pressed", String(l === shown)));
  };
  const pick = (listing: Listing) => {
    shown = listing;
    refresh();
  };
  const files = products.map((p) => make("li", {}, make("button", {
    type: "button", className: "quiet", onclick: () => void attempt(async () => download(p.name, await p.bytes())),
  }, `Download ${p.name}`), p.about ? make("span", {}, p.about) : ""));
  place.replaceChildren(make("details", { className: "code-panel panel", ontoggle: refresh },
    make("summary", {}, "Here is the code that did this"),
    ...(options.note ? [make("p", { className: "note" }, options.note)] : []),
    make("div", { className: "bar" }, ...(listings.length > 1 ? picks : []), copied, copy, take),
    pre,
    ...(files.length ? [make("h3", {}, "Files to take along"), make("ul", { className: "products" }, ...files)] : []),
  ));
  refresh();
  return { refresh };
}
