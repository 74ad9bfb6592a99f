import { execFileSync } from "node:child_process";
import { cpSync, mkdtempSync, readdirSync, readFileSync, rmSync, symlinkSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Browser, Page } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { FIXTURES, python, ROOT } from "../support.js";
import { start } from "./page.js";
import { bundle, install, pack, serveFolder } from "./project.js";

const EXAMPLES = `${ROOT}/examples/web`;
const folder = mkdtempSync(join(tmpdir(), "onnxtrain-"));
let browser: Browser;
let archive: string;
beforeAll(async () => {
  archive = pack(folder);
  execFileSync(python(), [`${EXAMPLES}/make_artifacts.py`, join(folder, "art")], { stdio: "inherit" });
  browser = await start();
});
afterAll(async () => {
  await browser?.close();
  rmSync(folder, { recursive: true });
});

/** Serves a directory, opens it and checks that the page reports no errors. */
async function visit(served: string, work: (page: Page) => Promise<void>): Promise<void> {
  const site = await serveFolder(served);
  const page = await browser.newPage();
  const errors: string[] = [];
  page.on("pageerror", (error) => errors.push(error.message));
  try {
    await page.goto(site.address);
    await work(page);
    expect(errors).toEqual([]);
  } finally {
    await page.close();
    site.server.close();
  }
}

const accuracy = async (page: Page) => parseFloat(/([\d.]+) % accuracy/.exec(await page.getByRole("status").innerText())![1]!);

test("examples have fewer than 60 lines", () => {
  for (const name of ["plain", "react", "gradient-graph"]) {
    const files = readdirSync(`${EXAMPLES}/${name}`, { recursive: true, encoding: "utf8" });
    const code = files.filter((f) => /\.(html|jsx?)$/.test(f) && !f.includes("node_modules"));
    expect(code.length).toBeGreaterThan(0);
    for (const file of code) {
      const lines = readFileSync(`${EXAMPLES}/${name}/${file}`, "utf8").split("\n").length;
      expect(lines, `${name}/${file}`).toBeLessThan(60);
    }
  }
});

test("a plain page trains without a bundler, and stops", async () => {
  const own = join(folder, "plain");
  install(own, archive, "onnxruntime-web");
  cpSync(`${EXAMPLES}/plain`, own, { recursive: true });
  symlinkSync(join(folder, "art"), join(own, "art"));
  await visit(own, async (page) => {
    await page.getByRole("button", { name: "Train" }).click();
    await page.waitForFunction(() => document.title === "done");
    expect(await accuracy(page)).toBeGreaterThan(90);
    // Both clicks in one task, so that the run cannot finish before it is stopped.
    await page.evaluate(() => ["train", "stop"].forEach((id) => document.getElementById(id)!.click()));
    await page.getByText("Stopped.").waitFor();
  });
});

test("a React component trains", async () => {
  const own = join(folder, "react");
  install(own, archive, "onnxruntime-web", "react", "react-dom", "vite");
  for (const file of ["index.html", "vite.config.js", "src"]) cpSync(`${EXAMPLES}/react/${file}`, join(own, file), { recursive: true });
  bundle(own);
  cpSync(join(folder, "art"), join(own, "dist/art"), { recursive: true });
  await visit(join(own, "dist"), async (page) => {
    await page.getByRole("button", { name: "Train" }).click();
    await page.getByText("Done: 10 of 10").waitFor();
    expect(await accuracy(page)).toBeGreaterThan(90);
    expect(await page.getByRole("button", { name: "Train" }).isEnabled()).toBe(true);
  });
});

test("the gradient-graph example trains in a page", async () => {
  const own = join(folder, "gradient-graph");
  install(own, archive, "onnxruntime-web");
  cpSync(`${EXAMPLES}/gradient-graph`, own, { recursive: true });
  cpSync(`${FIXTURES}/graphs`, own, { recursive: true });
  await visit(own, async (page) => {
    await page.waitForFunction(() => document.title === "done");
    expect(parseFloat(/loss ([\d.]+)/.exec(await page.locator("#status").innerText())![1]!)).toBeLessThan(0.5);
  });
});
