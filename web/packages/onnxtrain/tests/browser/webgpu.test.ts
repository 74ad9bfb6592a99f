import type { Server } from "node:http";
import type { Browser } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { distance, fixture, MODELS } from "../support.js";
import { openPage, serve, start, train } from "./page.js";

let browser: Browser;
let site: { server: Server; address: string };
beforeAll(async () => {
  [browser, site] = await Promise.all([start({ webgpu: true }), serve(true)]);
});
afterAll(async () => {
  await browser?.close();
  site?.server.close();
});

test.each(MODELS)("%s follows Python on a GPU in software", async (model) => {
  const f = await fixture(`${model}-webgpu`);
  const { page } = await openPage(browser, site.address);
  const found = await train(page, `${model}-webgpu`, { device: "webgpu", seed: f.expected.seed });
  expect(found.messages).toEqual([]);
  expect(found.device).toBe("webgpu");
  expect(distance(found.losses, f.expected.losses)).toBeLessThan(1e-4);
  expect(Math.abs(found.evaluated - f.expected.eval)).toBeLessThan(1e-4);
  expect(distance(found.logits, f.predictions.get("logits")!.data as Float32Array)).toBeLessThan(1e-3);
  await page.close();
}, 300_000);
