/** The panel "Show the code": the program behind a page, and its files to download. */
import "./code-panel.css";
import { attempt, download, make } from "./dom.js";

/** A program to read, copy and download; its text may depend on settings. */
export interface Listing {
  readonly name: string;
  readonly text: () => string;
}

/** A file that is created on download: a model, a checkpoint. */
export interface Product {
  readonly name: string;
  readonly about?: string;
  readonly bytes: () => Promise<Uint8Array> | Uint8Array;
}

/** Fills an element with the panel; `refresh()` updates the listings. The button `#download` of a page downloads the model. */
export function codePanel(
  place: HTMLElement, options: { listings: readonly Listing[]; products?: readonly Product[]; note?: string },
): { refresh(): void } {
  const { listings, products = [] } = options;
  const code = make("code");
  const pre = make("pre", { tabIndex: 0, "aria-label": "Code" }, code);
  let shown = listings[0]!;
  const tabs = listings.map((l) => make("button", { type: "button", className: "pick", onclick: () => select(l) }, l.name));
  const copied = make("span", { className: "copied", role: "status" });
  const copy = make("button", { type: "button", className: "quiet", onclick: () => void attempt(async () => {
    await navigator.clipboard.writeText(shown.text());
    copied.textContent = "Copied.";
    setTimeout(() => (copied.textContent = ""), 2000);
  }) }, "Copy");
  const save = make("button", { type: "button", className: "quiet", onclick: () => download(shown.name, shown.text()) }, "Download");
  const refresh = () => {
    code.textContent = shown.text();
    listings.forEach((l, i) => tabs[i]!.setAttribute("aria-pressed", String(l === shown)));
  };
  const select = (listing: Listing) => {
    shown = listing;
    refresh();
  };
  const fetched = (p: Product) => void attempt(async () => download(p.name, await p.bytes()));
  const model = products.find((p) => p.name.endsWith(".onnx"));
  const button = document.getElementById("download");
  if (button && model) button.onclick = () => fetched(model);
  const files = products.map((p) => make("li", {}, make("button", {
    type: "button", className: "quiet", onclick: () => fetched(p),
  }, `Download ${p.name}`), p.about ? make("span", {}, p.about) : ""));
  place.replaceChildren(make("details", { className: "code-panel panel", ontoggle: refresh },
    make("summary", {}, "Show the code"),
    ...(options.note ? [make("p", { className: "note" }, options.note)] : []),
    make("div", { className: "bar" }, ...(listings.length > 1 ? tabs : []), copied, copy, save),
    pre,
    ...(files.length ? [make("h3", {}, "Files"), make("ul", { className: "products" }, ...files)] : []),
  ));
  refresh();
  return { refresh };
}
