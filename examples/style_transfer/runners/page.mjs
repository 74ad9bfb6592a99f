// Uses the page as a person would: node page.mjs MODELS PICTURE SIZE OUT. Writes the pixels (RGBA) before
// and after to OUT.before and OUT.after, and prints what the page says.
import { writeFileSync } from "node:fs";
import { serve } from "../page/serve.mjs";
import { browser } from "./chromium.mjs";

const [models, picture, size, out] = process.argv.slice(2);
const site = await serve({ "/models/": models });
const chromium = await browser();
try {
  const page = await chromium.newPage();
  const complaints = [];
  page.on("pageerror", (error) => complaints.push(error.message));
  await page.goto(site.address);
  await page.waitForFunction(() => document.querySelector("#style").options.length > 0);
  await page.locator("#size").selectOption(size);
  await page.locator("#file").setInputFiles(picture);
  await page.waitForFunction(
    () => / s on |did not work|no picture/.test(document.querySelector("#status").textContent), undefined,
    { timeout: 600_000 },
  );
  const status = await page.locator("#status").innerText();
  for (const which of ["before", "after"]) {
    const found = await page.evaluate((id) => {
      const canvas = document.getElementById(id);
      const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return { width, height, data: Array.from(data) };
    }, which);
    writeFileSync(`${out}.${which}`, Uint8Array.from(found.data));
  }
  if (status.includes(" s on ")) await page.waitForFunction(() => !document.querySelector("#save").hidden);
  console.log(JSON.stringify({ status, complaints }));
} finally {
  await chromium.close();
  site.server.close();
}
