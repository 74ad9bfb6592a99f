/** Vite plugin that adds head, header, footer and content security policy to every page. */
import { createHash } from "node:crypto";
import { existsSync, readFileSync } from "node:fs";
import { PAGES, START } from "./pages.js";

// Runs before the first paint: applies the saved theme, so that the page does not flash.
const THEME = 'try { const t = localStorage.getItem("theme"); if (t) document.documentElement.dataset.theme = t; } catch {}';
const hash = createHash("sha256").update(THEME).digest("base64");

// Built pages may compile wasm, start their own workers and fetch from their own origin only.
const POLICY = [
  "default-src 'none'", `script-src 'self' 'wasm-unsafe-eval' blob: 'sha256-${hash}'`, "worker-src 'self' blob:",
  "connect-src 'self' blob: data:", "style-src 'self'", "img-src 'self' data: blob:", "media-src 'self' blob: data:",
  "font-src 'self'", "base-uri 'none'", "form-action 'none'",
].join("; ");

// URLs of the deployment. GitHub Actions sets the last two automatically.
const { SITE_URL, DOCS_URL, GITHUB_SERVER_URL, GITHUB_REPOSITORY } = process.env;
const SOURCE_URL = process.env.SOURCE_URL ?? (GITHUB_SERVER_URL && GITHUB_REPOSITORY && `${GITHUB_SERVER_URL}/${GITHUB_REPOSITORY}`);

const MARK = `<svg class="mark" viewBox="0 0 32 32" width="28" height="28" aria-hidden="true"><path d="M3 6c3 15 9 20 14 20 6 0 9-6 12-9" fill="none" stroke="currentColor" stroke-width="3" stroke-linecap="round"/><circle class="ball" cx="17" cy="21" r="4.5"/></svg>`;
const SUN = `<svg class="sun" viewBox="0 0 24 24" width="20" height="20" aria-hidden="true"><circle cx="12" cy="12" r="4.5" fill="currentColor"/><path d="M12 2v3M12 19v3M2 12h3M19 12h3M4.9 4.9l2.1 2.1M17 17l2.1 2.1M19.1 4.9 17 7M7 17l-2.1 2.1" stroke="currentColor" stroke-width="2" stroke-linecap="round"/></svg>`;
const MOON = `<svg class="moon" viewBox="0 0 24 24" width="20" height="20" aria-hidden="true"><path d="M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5Z" fill="currentColor"/></svg>`;

const escaped = (text) => text.replace(/&/g, "&amp;").replace(/"/g, "&quot;").replace(/</g, "&lt;");
const link = (url, text) => (url ? `<a href="${url}">${text}</a>` : "");
// docs/conf.py shows the hidden link where the site is a part of the documentation.
const docs = (base) => (DOCS_URL ? link(/^https?:/.test(DOCS_URL) ? DOCS_URL : base + DOCS_URL, "Documentation") : `<a href="${base}../" hidden>Documentation</a>`);

const head = (page, base) => {
  const title = page.folder ? `${page.name} · onnxtrain` : `onnxtrain: ${page.name.toLowerCase()}`;
  const image = SITE_URL ? new URL("card.png", SITE_URL).href : undefined;
  return `
    <meta charset="utf-8" />
    <meta name="viewport" content="width=device-width, initial-scale=1" />
    <meta name="color-scheme" content="light dark" />
    <title>${escaped(title)}</title>
    <meta name="description" content="${escaped(page.description)}" />
    <meta property="og:type" content="website" />
    <meta property="og:site_name" content="onnxtrain" />
    <meta property="og:title" content="${escaped(title)}" />
    <meta property="og:description" content="${escaped(page.description)}" />
    ${SITE_URL ? `<meta property="og:url" content="${new URL(page.folder ? `${page.folder}/` : "", SITE_URL).href}" />` : ""}
    ${image ? `<meta property="og:image" content="${image}" />\n    <meta name="twitter:card" content="summary_large_image" />` : ""}
    <link rel="icon" type="image/svg+xml" href="${base}src/shell/icon.svg" />
    <script>${THEME}</script>
    <link rel="stylesheet" href="${base}src/shell/style.css" />
    <script type="module" src="${base}src/shell/shell.ts"></script>`;
};

const navigation = (page, base) => PAGES.map((p) => {
  const here = p.folder === page.folder ? ' aria-current="page"' : "";
  return `<li><a href="${base}${p.folder}/"${here}>${p.name}</a></li>`;
}).join("");

const header = (page, base) => `
    <a class="skip" href="#main">Skip to content</a>
    <header class="site-header">
      <a class="home" href="${base}"${page.folder ? "" : ' aria-current="page"'}>${MARK}<span>onnxtrain</span></a>
      <nav aria-label="Pages"><ul>${navigation(page, base)}</ul></nav>
      <button class="icon-button" id="theme" type="button" aria-label="Dark theme" aria-pressed="false">${SUN}${MOON}</button>
    </header>`;

const footer = (base) => `
    <footer class="site-footer">
      <p><strong>Nothing leaves this tab.</strong> Models, data, drawings, recordings and files stay on your device; these pages have no server.</p>
      <p class="links">${[
        docs(base), link(SOURCE_URL, "Source"), '<button id="share-page" class="link" type="button">Share this page</button>',
        link(`${base}#how`, "How it works"), link("https://onnx.ai/", "ONNX"), link("https://onnxruntime.ai/", "ONNX Runtime"),
      ].filter(Boolean).join("")}</p>
    </footer>`;

const cards = () => PAGES.map((p) => `
        <li><a class="card" href="./${p.folder}/"><svg class="illustration" aria-hidden="true"><use href="#illustration-${p.folder}" /></svg><h2>${p.name}</h2><p>${p.line}</p></a></li>`).join("");

// The image of link previews.
const CARD = new URL("../../docs/images/site-playground-light.png", import.meta.url);

/** The Vite plugins. */
export const shell = () => [
  {
    name: "card",
    apply: "build",
    generateBundle() {
      if (existsSync(CARD)) this.emitFile({ type: "asset", fileName: "card.png", source: readFileSync(CARD) });
    },
  },
  {
    name: "shell",
    transformIndexHtml: {
      order: "pre",
      handler(html, { path }) {
        const folder = path.split("/").filter(Boolean).slice(0, -1).join("/");
        const page = PAGES.find((p) => p.folder === folder) ?? START;
        const base = folder ? "../" : "./";
        return html
          .replace("<html", `<html data-base="${base}"`)
          .replace("<head>", () => `<head>${head(page, base)}`)
          .replace("<body>", () => `<body>${header(page, base)}`)
          .replace("</body>", () => `${footer(base)}\n  </body>`)
          .replace("<!-- cards -->", cards);
      },
    },
  },
  {
    // Not during development: Vite's development server injects inline scripts and styles.
    name: "content-security-policy",
    apply: "build",
    transformIndexHtml: () => [
      { tag: "meta", attrs: { "http-equiv": "Content-Security-Policy", content: POLICY }, injectTo: "head-prepend" },
    ],
  },
];
