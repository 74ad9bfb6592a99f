import { join } from "node:path";
import type { Page } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { runPython } from "../support.js";
import { DESK, PHONE, Site, until } from "./site.js";

let site: Site;
beforeAll(async () => {
  site = await Site.open({ camera: true });
  // Discs and crosses with random colors and positions.
  runPython(
    `
import sys, numpy as np
from PIL import Image, ImageDraw
rng = np.random.default_rng(0)
for kind in ("disc", "cross"):
    for i in range(14):
        colors = [tuple(int(v) for v in rng.integers(low, low + 90, 3)) for low in (160, 0)]
        image = Image.new("RGB", (160, 120), colors[0]); pen = ImageDraw.Draw(image)
        x, y, r = rng.integers(65, 95), rng.integers(50, 70), rng.integers(28, 42)
        if kind == "disc": pen.ellipse([x - r, y - r, x + r, y + r], fill=colors[1])
        else: pen.line([x - r, y - r, x + r, y + r], colors[1], 11); pen.line([x - r, y + r, x + r, y - r], colors[1], 11)
        image.save(f"{sys.argv[1]}/{kind}{i}.png")
`,
    site.folder,
  );
});
afterAll(() => site?.close());

const files = (kind: string, from: number, to: number) => Array.from({ length: to - from }, (_, i) => join(site.folder, `${kind}${from + i}.png`));
const verdict = (page: Page) => page.locator("#verdict").innerText();
const count = (page: Page, item: number) => page.locator("#classes .count").nth(item).innerText().then((text) => parseInt(text));

test("learns two classes of images and downloads them as one model", async () => {
  const { page, pageErrors, close } = await site.page("teach/", { ...DESK, acceptDownloads: true });
  await until(page, "Ready.");
  await page.getByLabel("Name of class 1").fill("Disc");
  // Typing in the next field keeps the focus there.
  await page.getByLabel("Name of class 2").click();
  await page.keyboard.press("ControlOrMeta+a");
  await page.keyboard.type("Cross");
  await page.keyboard.press("Tab");
  const learn = page.getByRole("button", { name: "Train", exact: true });
  expect(await learn.isDisabled()).toBe(true);
  for (const [name, kind] of [["Disc", "disc"], ["Cross", "cross"]] as const) {
    await page.getByLabel(`Images of ${name}`).setInputFiles(files(kind, 0, 10));
    await until(page, `Added 10 images to ${name}.`);
  }
  await learn.click();
  await until(page, "Trained on 20 examples of 2 classes");
  const answers: string[] = [];
  for (const file of [...files("disc", 10, 14), ...files("cross", 10, 14)]) {
    await page.evaluate(() => (document.querySelector("#verdict")!.textContent = ""));
    await page.setInputFiles("#ask", file);
    await expect.poll(() => verdict(page)).not.toBe("");
    answers.push(await page.evaluate(() => document.querySelector("#bars .top .label")!.textContent!));
  }
  const right = answers.filter((a, i) => a === (i < 4 ? "Disc" : "Cross")).length;
  expect(right, answers.join()).toBeGreaterThanOrEqual(6);

  await page.getByText("Show the code").click();
  expect(await page.locator(".code-panel code").innerText()).toContain('const names = ["Disc","Cross"]');
  const [model] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download classifier.onnx" }).click()]);
  await model.saveAs(join(site.folder, "classifier.onnx"));
  const planes = await page.evaluate(() => [...document.querySelector<HTMLCanvasElement>("#look")!.getContext("2d")!.getImageData(0, 0, 64, 64).data]);
  const share = await page.locator("#bars .share").allInnerTexts();
  const chances = runPython(
    `
import json, sys, numpy as np, onnx, onnxruntime
model = onnx.load(sys.argv[1]); onnx.checker.check_model(model, full_check=True)
assert [v.name for v in model.graph.input] == ["image"] and [v.name for v in model.graph.output] == ["logits"]
image = np.array(json.loads(sys.argv[2]), np.float32).reshape(64, 64, 4)[..., :3].transpose(2, 0, 1)[None] / 255
(logits,) = onnxruntime.InferenceSession(sys.argv[1]).run(None, {"image": image})
chances = np.exp(logits[0] - logits[0].max()); print(json.dumps((chances / chances.sum()).tolist()))
`,
    join(site.folder, "classifier.onnx"), JSON.stringify(planes),
  );
  (JSON.parse(chances) as number[]).forEach((c, i) => expect(Math.abs(100 * c - parseInt(share[i]!))).toBeLessThan(1));
  expect(pageErrors).toEqual([]);
  await close();
});

test("records examples from camera and microphone, by touch and by keyboard", async () => {
  const { page, pageErrors, close } = await site.page("teach/", { ...PHONE, permissions: ["camera", "microphone"] });
  await until(page, "Ready.");
  await page.getByText("Camera", { exact: true }).tap();
  await until(page, "The camera is on.");
  const record = page.getByRole("button", { name: /^Record examples of Class/ });
  await record.first().scrollIntoViewIfNeeded();
  const box = (await record.first().boundingBox())!;
  await page.mouse.move(box.x + 20, box.y + 20);
  await page.mouse.down();
  await expect.poll(() => count(page, 0)).toBeGreaterThanOrEqual(4);
  await page.mouse.up();
  await page.getByText("Microphone", { exact: true }).tap();
  await until(page, "The microphone is on.");
  await record.nth(1).focus();
  // A key press records for two seconds: on a busy machine these are few examples.
  while (!((await count(page, 1)) >= 4)) {
    await page.keyboard.press("Enter");
    await expect.poll(() => record.nth(1).getAttribute("aria-pressed")).toBe("false");
  }
  await page.getByRole("button", { name: "Train", exact: true }).tap();
  await until(page, "Trained on ");
  // The microphone now records the second class.
  await expect.poll(() => page.evaluate(() => document.querySelector("#bars .top .label")?.textContent)).toBe("Class 2");
  await page.getByRole("button", { name: "Run an example" }).tap();
  await until(page, "Trained on 72 examples of 3 classes");
  await expect.poll(() => page.locator("#bars .top").count()).toBe(1);
  await page.getByRole("button", { name: "Remove Stars" }).tap();
  expect(await page.locator("#classes li").count()).toBe(2);
  expect(await page.evaluate(() => document.documentElement.scrollWidth)).toBeLessThanOrEqual(390);
  expect(pageErrors).toEqual([]);
  await close();
});
