/** What the header does on every page: the theme, and the place of the page in a row of links that scrolls. */
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
