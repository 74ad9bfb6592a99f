/** Small words for the page's elements. */
export const $ = <T extends HTMLElement>(id: string): T => document.getElementById(id) as T;
export const text = (id: string): string => $<HTMLInputElement>(id).value;
export const number = (id: string): number => Number(text(id));
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
