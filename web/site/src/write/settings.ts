/** The settings of the page, and the link that holds them. */
import { $, text } from "../shell/dom.js";

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

/** Gives the address of this page with its settings. */
export function toLink(withText: boolean): string {
  const values = new URLSearchParams(NAMES.map((name) => [name, text(name)]));
  if (withText) {
    if (text("source").length > LONGEST) throw new Error(`the text has ${text("source").length} characters, a link holds ${LONGEST}`);
    values.set("text", text("source"));
  }
  return `${location.href.replace(/#.*/, "")}#${values}`;
}
