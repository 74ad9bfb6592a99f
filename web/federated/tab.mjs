// Opens a page in a headless browser until it gets SIGINT or SIGTERM: node tab.mjs URL
import { existsSync } from "node:fs";
import { chromium } from "playwright-core";

const known = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
const executablePath = process.env.CHROMIUM ?? known.find(existsSync);
if (!executablePath) throw new Error("no browser found: install chromium, or set CHROMIUM");
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"], handleSIGTERM: false });
// Accept a self-signed certificate on localhost.
const page = await browser.newPage({ ignoreHTTPSErrors: process.argv[2].startsWith("https://127.0.0.1") });
page.on("console", (message) => console.log(message.text()));
page.on("pageerror", (error) => console.log("error", error.message));
await page.goto(process.argv[2]);
const ended = new Promise((resolve) => ["SIGINT", "SIGTERM"].forEach((name) => process.once(name, resolve)));
const reload = process.env.RELOAD_AFTER;
if (reload) setTimeout(() => void page.reload().then(() => console.log("reloaded")), Number(reload) * 1000);
await ended;
if (process.env.SCREENSHOT) await page.screenshot({ path: process.env.SCREENSHOT, fullPage: true });
await page.evaluate(() => globalThis.node?.leave());
await browser.close();
