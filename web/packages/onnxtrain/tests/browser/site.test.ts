import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { gzipSync } from "node:zlib";
import { afterAll, beforeAll, expect, test } from "vitest";
import { DESK, PHONE, Site } from "./site.js";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const PAGES = ["", "playground/", "draw/", "teach/", "write/", "style/", "model/"];
let site: Site;

beforeAll(async () => {
  site = await Site.open();
});
afterAll(() => site?.close());

declare const axe: { run(): Promise<{ violations: { id: string; impact: string; nodes: { html: string; failureSummary: string }[] }[] }> };

test.each(PAGES)("page '%s' has no serious accessibility violations, on a phone and on a desktop", async (path) => {
  for (const options of [PHONE, DESK]) {
    const { page, close } = await site.page(path, { ...options, bypassCSP: true });
    await page.locator("h1").waitFor();
    await page.evaluate(AXE);
    const result = await page.evaluate(async () => (await axe.run()).violations
      .filter((v) => v.impact === "serious" || v.impact === "critical")
      .map((v) => `${v.id}: ${v.nodes.map((n) => `${n.html.slice(0, 120)} ${n.failureSummary}`).join("\n")}`));
    expect(result, `${path} at ${options.viewport!.width}`).toEqual([]);
    expect(await page.evaluate(() => document.documentElement.scrollWidth), `${path} sideways`).toBeLessThanOrEqual(options.viewport!.width);
    await close();
  }
});

test("every page offers the trained model without opening a panel, and a link to itself", async () => {
  const { page, close } = await site.page("", { ...DESK, permissions: ["clipboard-read", "clipboard-write"] });
  for (const path of PAGES) {
    await page.goto(site.address + path);
    if (path) expect(await page.getByRole("button", { name: "Download .onnx" }).isVisible(), path).toBe(true);
    await page.getByRole("button", { name: "Share this page" }).click();
    await page.getByRole("button", { name: "Link copied" }).waitFor();
    expect(await page.evaluate(() => navigator.clipboard.readText())).toMatch(new RegExp(`^${site.address}${path}(#.*)?$`));
  }
  await close();
});

test("on a phone, metrics stand in even rows and a net of three layers fits", async () => {
  const { page, close } = await site.page("draw/", PHONE);
  const lefts = await page.locator(".facts > div").evaluateAll((all) => all.map((e) => Math.round(e.getBoundingClientRect().left)));
  expect(new Set(lefts).size).toBe(2);
  await page.goto(`${site.address}playground/#hidden=8-6-4`);
  await page.locator(".column").nth(4).waitFor();
  const [inner, outer] = await page.locator(".diagram").evaluate((e) => [e.scrollWidth, e.clientWidth]);
  expect(inner).toBeLessThanOrEqual(outer!);
  await close();
});

test("every page has a title, a description and link previews", async () => {
  const { page, close } = await site.page("", DESK);
  for (const path of PAGES) {
    await page.goto(site.address + path);
    const output = await page.evaluate(() => ({
      title: document.title,
      description: document.querySelector<HTMLMetaElement>("[name=description]")!.content,
      og: [...document.querySelectorAll<HTMLMetaElement>("[property^='og:']")].map((m) => m.content),
      icon: document.querySelector<HTMLLinkElement>("[rel=icon]")!.href,
      h1: document.querySelectorAll("h1").length,
      here: document.querySelector("[aria-current=page]")?.textContent,
      footer: document.querySelector("footer")!.textContent,
    }));
    expect(output.title).toContain("onnxtrain");
    expect(output.description.length).toBeGreaterThan(50);
    expect(output.og).toContain(output.description);
    expect((await page.request.get(output.icon)).ok()).toBe(true);
    expect(output.h1).toBe(1);
    expect(output.here).toBeTruthy();
    expect(output.footer).toContain("Nothing leaves this tab");
  }
  await close();
});

test("the start page links to all six pages, and the theme is remembered", async () => {
  const { page, pageErrors, close } = await site.page("", DESK);
  expect(await page.locator(".cards a").count()).toBe(6);
  const background = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await background();
  await page.getByRole("button", { name: "Dark theme" }).click();
  const dark = await background();
  expect(dark).not.toBe(light);
  await page.getByRole("link", { name: /^Draw/ }).first().click();
  await page.waitForURL(/\/onnxtrain\/draw\/$/);
  expect(await background()).toBe(dark);
  await page.getByRole("button", { name: "Dark theme" }).click();
  await page.reload();
  expect(await background()).toBe(light);
  expect(pageErrors).toEqual([]);
  await close();
});

test("the content security policy blocks injected scripts and other origins", async () => {
  const { page, pageErrors, close } = await site.page("draw/", DESK);
  // The attribute stays after the first step.
  await page.waitForFunction(() => document.querySelector<HTMLElement>("#status")!.dataset["first"] !== undefined);
  expect(pageErrors).toEqual([]);
  await page.evaluate(() => {
    document.addEventListener("securitypolicyviolation", (event) => (document.title += ` ${event.effectiveDirective}`));
    document.body.insertAdjacentHTML("beforeend", "<img src=x onerror=\"document.title = 'ran'\">");
    document.head.append(Object.assign(document.createElement("script"), { textContent: "document.title = 'ran'" }));
    void fetch("https://example.org/").catch(() => undefined);
  });
  await page.waitForFunction(() => ["connect-src", "script-src-elem", "script-src-attr"].every((d) => document.title.includes(d)));
  expect(await page.title()).not.toContain("ran");
  await close();
});

test("the first load is small, not counting the runtime and models", async () => {
  const sizes: string[] = [];
  const others = /\/ort[.-]|\.wasm$|\/art\/|\.onnx$/;
  for (const path of PAGES) {
    const { page, close } = await site.page("", DESK);
    await page.goto("about:blank");
    const loaded: Promise<Buffer>[] = [];
    page.on("response", (response) => {
      const own = response.ok() && response.url().startsWith(site.address) && !others.test(response.url());
      if (own) loaded.push(response.body().catch(() => Buffer.alloc(0)));
    });
    await page.goto(site.address + path, { waitUntil: "networkidle" });
    await page.waitForFunction(() => !/^Loading/.test(document.querySelector("#status")?.textContent ?? ""));
    await page.waitForLoadState("networkidle");
    const files = await Promise.all(loaded);
    const bytes = files.reduce((n, body) => n + body.length, 0);
    const packed = files.reduce((n, body) => n + gzipSync(body).length, 0);
    sizes.push(`${path || "start"} ${Math.round(bytes / 1000)} kB, ${Math.round(packed / 1000)} kB after gzip`);
    expect(packed, path).toBeGreaterThan(1000);
    expect(bytes, path).toBeLessThan(300_000);
    await close();
  }
  console.log(`first loads: ${sizes.join("; ")}`);
});
