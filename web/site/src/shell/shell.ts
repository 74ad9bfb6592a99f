/** Header and footer of every page: theme switch, scrolling the navigation to the current page, copying the link. */
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

// Pages with settings have a button of their own, whose link contains them.
const share = document.getElementById("share-page") as HTMLButtonElement;
share.onclick = async () => {
  const own = document.getElementById("share");
  if (own) own.click();
  const copied = own ? true : await navigator.clipboard.writeText(location.href).then(() => true, () => false);
  const before = share.textContent;
  share.textContent = copied ? "Link copied" : "Copy the address above";
  setTimeout(() => (share.textContent = before), 2500);
};
