/** Small words for the page's elements. */
export const $ = <T extends HTMLElement>(id: string): T => document.getElementById(id) as T;
export const text = (id: string): string => $<HTMLInputElement>(id).value;
export const number = (id: string): number => Number(text(id));

const wrong = (id: string, expected: string): never => {
  const name = $<HTMLInputElement>(id).labels![0]!.firstChild!.textContent!.trim();
  throw new Error(`${name} is ${text(id) === "" ? "empty" : text(id)}, expected ${expected}`);
};
/** Gives the number of a setting; the error names the setting. */
export const positive = (id: string): number => (number(id) > 0 && Number.isFinite(number(id)) ? number(id) : wrong(id, "a number above 0"));
export const whole = (id: string): number => (Number.isSafeInteger(number(id)) && number(id) > 0 ? number(id) : wrong(id, "a whole number above 0"));

export const show = (id: string, words: string): void => void ($(id).textContent = words);
export const say = (message: string): void => show("status", message);

/** Does something that may fail, and says so if it does. */
export async function attempt(work: () => Promise<void>): Promise<void> {
  try {
    await work();
  } catch (error) {
    say(`Failed: ${(error as Error).message}`);
  }
}

/** Gives a file to the person. */
export function download(name: string, bytes: Uint8Array): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([bytes as Uint8Array<ArrayBuffer>]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
