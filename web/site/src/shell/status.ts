/** One line that says what happens; screen readers hear it (`<p id="status" role="status">` in the page). */
import { $, show } from "./dom.js";

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
