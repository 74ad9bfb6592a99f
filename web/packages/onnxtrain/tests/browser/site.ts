/** Builds the site and serves it like a static host, for the tests of its pages. */
import { execFileSync } from "node:child_process";
import { existsSync, mkdtempSync, readdirSync, rmSync, statSync, symlinkSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Browser, BrowserContextOptions, Page } from "playwright-core";
import { build } from "vite";
import { python, ROOT } from "../support.js";
import { start } from "./page.js";
import { serveFolder } from "./project.js";

export const SITE = `${ROOT}/web/site`;
const WEB = `${ROOT}/web`;

/** Returns the modification time of the newest file below some paths. */
function newest(...paths: string[]): number {
  return Math.max(0, ...paths.filter((p) => existsSync(p)).map((path) => {
    const about = statSync(path);
    if (!about.isDirectory()) return about.mtimeMs;
    return Math.max(...readdirSync(path).filter((n) => !["node_modules", "dist", "public", "__pycache__"].includes(n)).map((n) => newest(join(path, n))), 0);
  }));
}

/** Builds the site if its sources are newer. */
export async function buildSite(): Promise<void> {
  const [made, built] = [`${SITE}/public/data/iris.csv`, `${SITE}/dist/index.html`];
  if (newest(made) <= newest(`${SITE}/make_artifacts.py`, `${SITE}/models`, `${SITE}/shipped`, `${ROOT}/src/onnxtrain`)) {
    execFileSync(python(), [`${SITE}/make_artifacts.py`, `${SITE}/public`], { stdio: "inherit" });
  }
  const pieces = readdirSync(SITE).filter((n) => n !== "dist" && n !== "node_modules").map((n) => join(SITE, n));
  const used = [made, ...pieces, ...readdirSync(`${WEB}/packages/onnxtrain/dist`).map((n) => `${WEB}/packages/onnxtrain/dist/${n}`)];
  if (newest(built) <= newest(...used)) await build({ root: SITE, logLevel: "error" });
}

export interface SessionRecord {
  readonly page: Page;
  /** Errors and warnings of the page. */
  readonly pageErrors: string[];
  close(): Promise<void>;
}

/** The site served below a path without special headers, and a browser. */
export class Site {
  private constructor(readonly address: string, readonly browser: Browser, readonly folder: string, private readonly end: () => void) {}

  static async open(options: { camera?: boolean; webgpu?: boolean } = {}): Promise<Site> {
    await buildSite();
    const folder = mkdtempSync(join(tmpdir(), "onnxtrain-"));
    symlinkSync(`${SITE}/dist`, join(folder, "onnxtrain"));
    const served = await serveFolder(folder);
    return new Site(`${served.address}onnxtrain/`, await start(options), folder, () => served.server.close());
  }

  /** Opens a page of the site, such as `draw/`. */
  async page(path: string, options: BrowserContextOptions = {}): Promise<SessionRecord> {
    const context = await this.browser.newContext(options);
    const page = await context.newPage();
    const pageErrors: string[] = [];
    page.on("pageerror", (error) => pageErrors.push(error.message));
    page.on("console", (message) => {
      if (message.type() === "error" || message.type() === "warning") pageErrors.push(message.text());
    });
    await page.goto(this.address + path);
    return { page, pageErrors, close: () => context.close() };
  }

  async close(): Promise<void> {
    await this.browser.close();
    this.end();
    rmSync(this.folder, { recursive: true });
  }
}

/** Waits for text in the status. It must stay there: text that is replaced quickly may be missed. */
export const until = (page: Page, text: string) =>
  page.waitForFunction((t) => document.querySelector("#status")!.textContent!.includes(t), text);

/**
 * Clicks Pause or Stop from inside the page while a run is active: a click from the test could arrive after its end.
 * Restarts a run that has ended already.
 */
export const interrupt = (page: Page, id: "pause" | "stop") => page.waitForFunction((name) => {
  const press = (button: string) => document.querySelector<HTMLButtonElement>(`#${button}`)!.click();
  const status = document.querySelector("#status")!.textContent!;
  if (status.startsWith("Done")) press("start");
  if (!/^Epoch [1-5] /.test(status)) return false;
  press(name);
  return true;
}, id);

export const PHONE: BrowserContextOptions = { viewport: { width: 390, height: 844 }, colorScheme: "dark", hasTouch: true };
export const DESK: BrowserContextOptions = { viewport: { width: 1280, height: 900 }, colorScheme: "light" };
