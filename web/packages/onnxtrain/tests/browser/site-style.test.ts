import { join } from "node:path";
import { writeFileSync } from "node:fs";
import type { Page } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { runPython } from "../support.js";
import { DESK, PHONE, Site, SITE, until } from "./site.js";

let site: Site;
beforeAll(async () => {
  site = await Site.open({ camera: true });
});
afterAll(() => site?.close());

/** Returns the pixels of a canvas. */
const pixels = (page: Page, id: string) => page.evaluate((name) => {
  const canvas = document.querySelector<HTMLCanvasElement>(`#${name}`)!;
  return [...canvas.getContext("2d")!.getImageData(0, 0, canvas.width, canvas.height).data];
}, id);

test("stylizes an uploaded image like Python and saves it", async () => {
  const { page, pageErrors, close } = await site.page("style/", { ...DESK, acceptDownloads: true });
  await until(page, "Stylized 640 x ");
  await page.getByLabel("large tiles").check();
  await until(page, "Stylized 384 x ");
  runPython("import sys, numpy as np; from PIL import Image; x = np.random.default_rng(0).uniform(0, 255, (6, 12, 3)); Image.fromarray(x.astype(np.uint8)).resize((96, 48)).save(sys.argv[1])", join(site.folder, "mine.png"));
  await page.setInputFiles("#file", join(site.folder, "mine.png"));
  await until(page, "Stylized 384 x 192 pixels"); // no sample image has this shape
  const [before, after] = [await pixels(page, "original"), await pixels(page, "stylized")];
  for (const [name, data] of [["before", before], ["after", after]] as const) writeFileSync(join(site.folder, name), Uint8Array.from(data));
  const far = runPython(
    `
import sys, numpy as np, onnxruntime
before, after = (np.fromfile(f"{sys.argv[1]}/{n}", np.uint8).reshape(192, 384, 4)[..., :3].transpose(2, 0, 1)[None] for n in ("before", "after"))
(styled,) = onnxruntime.InferenceSession(sys.argv[2]).run(None, {"image": before.astype(np.float32)})
print(np.abs(styled - after).max(), np.abs(styled - before).mean())
`,
    site.folder, `${SITE}/shipped/models/style.onnx`,
  ).split(" ").map(Number);
  expect(far[0]).toBeLessThan(1); // rounding to integers plus differences between kernels
  expect(far[1]).toBeGreaterThan(20);
  const [file] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Save image" }).click()]);
  expect(file.suggestedFilename()).toBe("stylized.png");
  await page.getByLabel("Share of the original").fill("100");
  expect(await page.evaluate(() => document.querySelector<HTMLElement>("#original")!.style.clipPath)).toMatch(/^inset\(0px 0%/);
  writeFileSync(join(site.folder, "no.png"), "not an image");
  await page.setInputFiles("#file", join(site.folder, "no.png"));
  await until(page, "Failed: cannot decode no.png as an image");
  expect(pageErrors).toEqual([]);
  await close();
});

test("stylizes the camera on a phone", async () => {
  const { page, pageErrors, close } = await site.page("style/", { ...PHONE, permissions: ["camera"] });
  await until(page, "Stylized 640 x ");
  await page.getByRole("button", { name: "Use the camera" }).tap();
  await until(page, "Stylizing the camera");
  await page.waitForFunction(() => document.querySelector<HTMLCanvasElement>("#stylized")!.width === 256);
  const first = await pixels(page, "stylized");
  await expect.poll(async () => (await pixels(page, "stylized")).some((v, i) => Math.abs(v - first[i]!) > 8)).toBe(true);
  await page.getByRole("button", { name: "Stop the camera" }).tap();
  await until(page, "The camera is off.");
  await page.getByRole("button", { name: "A dahlia" }).tap();
  await until(page, "Stylized 640 x ");
  expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(390);
  expect(pageErrors).toEqual([]);
  await close();
});
