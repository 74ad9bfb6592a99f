// Screenshots of the site for the documentation: node screenshots.mjs OUT, after `make site`.
import { createServer } from "node:http";
import { existsSync, readFileSync, statSync } from "node:fs";
import { extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

const dist = fileURLToPath(new URL("./dist/", import.meta.url));
const out = process.argv[2] ?? fileURLToPath(new URL("../../docs/images/", import.meta.url));
const only = process.argv[3];
const TYPES = {
  ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml",
  ".json": "application/json", ".wasm": "application/wasm",
};
const server = createServer((request, response) => {
  const path = decodeURIComponent(new URL(request.url, "http://x").pathname);
  const file = join(dist, normalize(path.endsWith("/") ? `${path}index.html` : path));
  if (!existsSync(file) || !statSync(file).isFile()) return response.writeHead(404).end();
  response.setHeader("Content-Type", TYPES[extname(file)] ?? "application/octet-stream").end(readFileSync(file));
});
await new Promise((resolve) => server.listen(0, resolve));
const address = `http://localhost:${server.address().port}/`;

const status = (page, text) => page.waitForFunction((t) => document.querySelector("#status").textContent.includes(t), text);
const percent = (page, share) => page.waitForFunction((s) => parseFloat(document.querySelector("#accuracy").textContent) >= s, share);

/** Draws strokes on the pad; coordinates are relative to its size. */
async function draw(page, ...strokes) {
  const box = await page.locator("#pad").boundingBox();
  for (const [first, ...rest] of strokes) {
    await page.mouse.move(box.x + first[0] * box.width, box.y + first[1] * box.height);
    await page.mouse.down();
    for (const [x, y] of rest) await page.mouse.move(box.x + x * box.width, box.y + y * box.height, { steps: 6 });
    await page.mouse.up();
  }
}

/** Interactions before each screenshot. */
const SCENES = {
  start: ["", async (page) => page.waitForFunction(() => /Step ([6-9]\d\d|\d{4})|trained in your browser in/.test(document.querySelector("#live-text").textContent))],
  playground: ["playground/#set=spirals&hidden=8-6&pace=400&seed=3&rate=0.03", async (page) => percent(page, 97)],
  draw: ["draw/", async (page) => {
    await status(page, "Epoch ");
    await draw(page, [[0.28, 0.2], [0.72, 0.2], [0.45, 0.85]]);
    await status(page, "Done");
  }],
  teach: ["teach/", async (page) => {
    await status(page, "Ready.");
    await page.getByRole("button", { name: "Run an example" }).click();
    await page.locator("#bars .top").waitFor();
  }],
  write: ["write/", async (page) => page.waitForFunction(() => Number(document.querySelector("#steps").textContent) >= 200)],
  style: ["style/", async (page) => {
    await status(page, "Stylized ");
    await page.locator("#split").fill("25");
    await page.locator("#split").blur();
  }],
  model: ["model/", async (page) => {
    await page.getByRole("button", { name: "Use the iris dataset" }).click();
    await status(page, "Ready.");
    await page.getByRole("button", { name: "Train my model" }).click();
    await status(page, "Done");
  }],
};
const VIEWS = [["light", { width: 1280, height: 900 }, "light"], ["dark", { width: 1280, height: 900 }, "dark"], ["phone", { width: 390, height: 844 }, "dark"]];

const browser = await chromium.launch({ executablePath: process.env["CHROMIUM"] ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
for (const [name, [path, prepare]] of Object.entries(SCENES)) {
  if (only && name !== only) continue;
  for (const [view, viewport, colorScheme] of VIEWS) {
    const page = await browser.newPage({ viewport, colorScheme });
    page.setDefaultTimeout(300_000);
    // Deterministic drawings and weights.
    await page.addInitScript(() => {
      let state = 7;
      Math.random = () => (state = (state * 16807) % 2147483647) / 2147483647;
    });
    await page.goto(address + path);
    await prepare(page);
    await page.evaluate(() => scrollTo(0, 0));
    await page.waitForTimeout(500);
    await page.screenshot({ path: join(out, `site-${name}-${view}.png`) });
    await page.close();
  }
}
await browser.close();
server.close();
