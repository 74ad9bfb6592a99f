import { execFileSync } from "node:child_process";
import { FIXTURES, python, ROOT } from "./support.js";

/**
 * Builds the fixtures with Python unless they are up to date; KEEP_FIXTURES=1 skips the check.
 *
 * BUILD_SITE=1 builds the demo site, which test files that run side by side share.
 */
export async function setup(): Promise<void> {
  if (process.env["BUILD_SITE"]) await (await import("./browser/site.js")).buildSite();
  if (process.env["KEEP_FIXTURES"]) return;
  for (const script of ["make_fixtures.py", "make_special_cases.py", "make_language_model.py"]) {
    execFileSync(python(), [`${ROOT}/web/packages/onnxtrain/tests/fixtures/${script}`, FIXTURES], { stdio: "inherit" });
  }
}
