// Tests the page: node page.mjs MODELS IMAGE SIZE OUT. Writes the RGBA pixels of input and output to
// OUT.before and OUT.after, and prints the status and errors of the page.
import { writeFileSync } from "node:fs";
import { serve } from "../page/serve.mjs";
import { browser } from "./chromium.mjs";

const [models, image, size, out] = process.argv.slice(2);
const site = await serve({ "/models/": models });
const chromium = await browser();
try {
  const page = await chromium.newPage();
  const errors = [];
  page.on("pageerror", (error) => errors.push(error.message));
  await page.goto(site.address);
  await page.waitForFunction(() => document.querySelector("#style").options.length > 0);
  await page.locator("#size").selectOption(size);
  await page.locator("#file").setInputFiles(image);
  await page.waitForFunction(
    () => / s on |^Failed/.test(document.querySelector("#status").textContent), undefined,
    { timeout: 600_000 },
  );
  const status = await page.locator("#status").innerText();
  for (const which of ["before", "after"]) {
    const pixels = await page.evaluate((id) => {
      const canvas = document.getElementById(id);
      const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return { width, height, data: Array.from(data) };
    }, which);
    writeFileSync(`${out}.${which}`, Uint8Array.from(pixels.data));
  }
  if (status.includes(" s on ")) await page.waitForFunction(() => !document.querySelector("#save").hidden);
  console.log(JSON.stringify({ status, errors }));
} finally {
  await chromium.close();
  site.server.close();
}
