/** Light and dark theme, and the colors of style.css for canvas drawings. */
const changed = new EventTarget();
const system = matchMedia("(prefers-color-scheme: dark)");
system.addEventListener("change", () => changed.dispatchEvent(new Event("change")));

/** Returns whether the page is dark, by the saved theme or the system setting. */
export function isDark(): boolean {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : system.matches;
}

/** Sets and saves the theme; it is not saved if it equals the system setting. */
export function setTheme(theme: "light" | "dark"): void {
  document.documentElement.dataset["theme"] = theme;
  try {
    if ((theme === "dark") === system.matches) localStorage.removeItem("theme");
    else localStorage.setItem("theme", theme);
  } catch {
    // Storage may be disabled: then the theme lasts as long as the page.
  }
  changed.dispatchEvent(new Event("change"));
}

/** Registers a callback for theme changes. */
export const onTheme = (redraw: () => void): void => changed.addEventListener("change", redraw);

const probe = document.createElement("span");
probe.hidden = true;

/** Returns the current value of a color variable, such as `--accent`, as `rgb(...)`. */
export function color(name: string): string {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

/** Returns the current value of a color variable as red, green and blue from 0 to 255. */
export function rgb(name: string): [number, number, number] {
  const [r = 0, g = 0, b = 0] = (color(name).match(/[\d.]+/g) ?? []).map(Number);
  return [r, g, b];
}

/** Returns whether the system setting prefers-reduced-motion is on. */
export const reducedMotion = (): boolean => matchMedia("(prefers-reduced-motion: reduce)").matches;
