/**
 * Builds the page of a web program with Vite, opens it in Chromium, trains, and prints its status as JSON.
 *
 *     node web_app.mjs APP PUBLIC OUT SCRIPT
 *
 * APP is the file with the React component; PUBLIC has models and data; OUT is an empty folder. Packages that draw
 * are replaced by `stubs/web.js`. `onnxruntime-web/training` is aliased as docs/web-migration.md says. SCRIPT, if it
 * is not empty, is a file of onnxruntime-web that the page loads as a classic script.
 */
import { cpSync, mkdirSync, readFileSync, symlinkSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

const [app, files, out, script] = process.argv.slice(2);
const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), "../..");
const require = createRequire(`${ROOT}/web/packages/onnxtrain/package.json`);
const { build, preview } = await import(pathToFileURL(require.resolve("vite")));
const { chromium } = require("playwright-core");

cpSync(dirname(app), join(out, "src"), { recursive: true });
cpSync(files, join(out, "public"), { recursive: true });
symlinkSync(`${ROOT}/web/node_modules`, join(out, "node_modules"));
writeFileSync(join(out, "main.jsx"), `
  import { createRoot } from "react-dom/client";
  import App from "./src/App";
  createRoot(document.getElementById("root")).render(<App />);`);
let head = "";
if (script) {
  cpSync(`${ROOT}/web/node_modules/onnxruntime-web/dist`, join(out, "public/ort"), { recursive: true });
  head = `<script src="/ort/${script}"></script>`;
}
writeFileSync(join(out, "index.html"), `<!doctype html><link rel="icon" href="data:,">${head}<div id="root"></div><script type="module" src="/main.jsx"></script>`);
const stubs = fileURLToPath(new URL("stubs/web.js", import.meta.url));
mkdirSync(join(out, "stubs"));
cpSync(stubs, join(out, "stubs/web.js"));
const options = {
  root: out, configFile: false, logLevel: "error",
  esbuild: { jsx: "automatic", tsconfigRaw: {} },
  build: { target: "es2022" },
  resolve: {
    alias: [
      { find: "onnxruntime-web/training", replacement: "onnxtrain/training" },
      { find: /^(@mui\/material(\/.*)?|react-plotly\.js)$/, replacement: join(out, "stubs/web.js") },
    ],
  },
};
await build(options);
const server = await preview({ ...options, preview: { port: 0 } });
const path = process.env.CHROMIUM ?? "/usr/bin/chromium";
const browser = await chromium.launch({ executablePath: path, args: ["--no-sandbox"] });
try {
  const page = await browser.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(error.message));
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  const failed = new Promise((resolve) => page.on("pageerror", resolve));
  await page.goto(server.resolvedUrls.local[0]);
  await page.locator("canvas").first().waitFor(); // the test digits, which both programs predict while they train
  await page.getByLabel("Number of epochs").fill("2");
  await page.getByRole("button", { name: "Train" }).click();
  const ended = page.waitForFunction(
    () => /completed|Done training/.test(document.querySelector("pre")?.textContent ?? "") || document.querySelector(".error"),
    undefined, { timeout: 540_000 },
  );
  await Promise.race([ended, failed]);
  const error = (await page.locator(".error").allTextContents()).join(" ");
  const plots = await page.locator("output").allTextContents();
  console.log(JSON.stringify({ status: await page.locator("pre").first().textContent(), error, errors, plots }));
} finally {
  await browser.close();
  await server.close();
}
process.exit(0);
