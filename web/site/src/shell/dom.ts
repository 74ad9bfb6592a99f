
/** Helpers for the elements of a page. */
export const $ = <T extends HTMLElement = HTMLElement>(id: string): T => document.getElementById(id) as T;
export const text = (id: string): string => $<HTMLInputElement>(id).value;
export const show = (id: string, text: string): void => {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
};

/** Creates an element: `make("button", { type: "button" }, "Train")`. Keys with a hyphen, `role` and `for` are set as attributes, others as properties. */
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

/** Returns the URL of a file of the site, such as `art/mlp/`, from any page. */
export const siteFile = (path: string): URL => new URL(`${document.documentElement.dataset["base"]!}${path}`, location.href);

const settingName = (id: string): string => $<HTMLInputElement>(id).labels![0]!.firstChild!.textContent!.trim();
const wrong = (id: string, expected: string): never => {
  throw new Error(`${settingName(id)} must be ${expected}, got ${text(id) === "" ? "an empty value" : text(id)}`);
};

/** Returns the value of a number setting; throws an error with its label if it is invalid. */
export const positive = (id: string): number => {
  const value = Number(text(id));
  return value > 0 && Number.isFinite(value) ? value : wrong(id, "a positive number");
};
export const whole = (id: string): number => {
  const value = Number(text(id));
  return Number.isSafeInteger(value) && value > 0 ? value : wrong(id, "a positive integer");
};

/** Downloads a file. */
export function download(name: string, content: Uint8Array | string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content as BlobPart]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// The status line (`<p id="status" role="status">` in the page), which screen readers announce.

/** Shows a message. */
export function say(message: string): void {
  $("status").classList.remove("failed");
  show("status", message);
}

/** Shows an error. */
export function fail(error: unknown): void {
  $("status").classList.add("failed");
  show("status", `Failed: ${(error as Error).message}`);
}

/** Runs `work` and shows its error if it fails. */
export async function attempt(work: () => Promise<void> | void): Promise<void> {
  try {
    await work();
  } catch (error) {
    if ((error as Error).name !== "AbortError") fail(error);
  }
}
