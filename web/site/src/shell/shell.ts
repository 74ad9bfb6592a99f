/** The header of every page: theme switch, and scrolling the navigation to the current page. */
import { isDark, setTheme } from "./theme.js";

const toggle = document.getElementById("theme") as HTMLButtonElement;
const show = () => toggle.setAttribute("aria-pressed", String(isDark()));
toggle.onclick = () => {
  setTheme(isDark() ? "light" : "dark");
  show();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
show();

const here = document.querySelector<HTMLElement>("nav [aria-current]");
if (here) here.closest("nav")!.scrollLeft = here.offsetLeft - 60;
