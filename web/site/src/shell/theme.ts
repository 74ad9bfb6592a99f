/** Light or dark, and the colours of style.css for what is drawn on a canvas. */
const changed = new EventTarget();
const system = matchMedia("(prefers-color-scheme: dark)");
system.addEventListener("change", () => changed.dispatchEvent(new Event("change")));

/** Returns whether the page is dark: by the person's choice, or as the system is. */
export function isDark(): boolean {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : system.matches;
}

/** Sets the theme and remembers it; what the system has is not remembered. */
export function setTheme(theme: "light" | "dark"): void {
  document.documentElement.dataset["theme"] = theme;
  try {
    if ((theme === "dark") === system.matches) localStorage.removeItem("theme");
    else localStorage.setItem("theme", theme);
  } catch {
    // Storage may be forbidden: then the choice lasts as long as the page.
  }
  changed.dispatchEvent(new Event("change"));
}

/** Calls back after every change between light and dark. */
export const onTheme = (redraw: () => void): void => changed.addEventListener("change", redraw);

const probe = document.createElement("span");
probe.hidden = true;

/** Returns a colour of style.css, such as `--accent`, as the theme has it now: `rgb(...)`. */
export function color(name: string): string {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

/** Returns a colour of style.css as red, green and blue, 0 to 255. */
export function rgb(name: string): [number, number, number] {
  const [r = 0, g = 0, b = 0] = (color(name).match(/[\d.]+/g) ?? []).map(Number);
  return [r, g, b];
}

/** Returns whether the person wants little motion. */
export const calm = (): boolean => matchMedia("(prefers-reduced-motion: reduce)").matches;
