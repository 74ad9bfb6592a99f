
/** Small words for the elements of a page. */
export const $ = <T extends HTMLElement = HTMLElement>(id: string): T => document.getElementById(id) as T;
export const text = (id: string): string => $<HTMLInputElement>(id).value;
export const show = (id: string, words: string): void => {
  const place = $(id);
  if (place.textContent !== words) place.textContent = words;
};

/** Makes an element: `make("button", { type: "button" }, "Go")`; keys that start with "aria-" or "data-" are attributes. */
export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K, properties: Record<string, unknown> = {}, ...inner: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role" || key === "for") element.setAttribute(key, String(value));
    else (element as unknown as Record<string, unknown>)[key] = value;
  }
  element.append(...inner);
  return element;
}

/** Returns the address of a file of the site, `art/mlp/` for one, from whichever page. */
export const siteFile = (path: string): URL => new URL(`${document.documentElement.dataset["base"]!}${path}`, location.href);

const settingName = (id: string): string => $<HTMLInputElement>(id).labels![0]!.firstChild!.textContent!.trim();
const wrong = (id: string, expected: string): never => {
  throw new Error(`${settingName(id)} is ${text(id) === "" ? "empty" : text(id)}, expected ${expected}`);
};

/** Returns the number of a setting; the error names the setting. */
export const positive = (id: string): number => {
  const value = Number(text(id));
  return value > 0 && Number.isFinite(value) ? value : wrong(id, "a number above 0");
};
export const whole = (id: string): number => {
  const value = Number(text(id));
  return Number.isSafeInteger(value) && value > 0 ? value : wrong(id, "a whole number above 0");
};

/** Returns a file to the person. */
export function download(name: string, content: Uint8Array | string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content as BlobPart]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** One line that says what happens; screen readers hear it (`<p id="status" role="status">` in the page). */

/** Says a sentence. */
export function say(message: string): void {
  $("status").classList.remove("failed");
  show("status", message);
}

/** Says what went wrong. */
export function fail(error: unknown): void {
  $("status").classList.add("failed");
  show("status", `Failed: ${(error as Error).message}`);
}

/** Does something that may fail, and says so if it does. */
export async function attempt(work: () => Promise<void> | void): Promise<void> {
  try {
    await work();
  } catch (error) {
    if ((error as Error).name !== "AbortError") fail(error);
  }
}
