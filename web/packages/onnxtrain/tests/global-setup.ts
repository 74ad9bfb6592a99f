import { execFileSync } from "node:child_process";
import { FIXTURES, python, ROOT } from "./support.js";

/** Makes what the tests compare with, if it is not there; KEEP_FIXTURES=1 takes it as it is. */
export function setup(): void {
  if (process.env["KEEP_FIXTURES"]) return;
  for (const script of ["make_fixtures.py", "make_special.py", "make_text.py"]) {
    execFileSync(python(), [`${ROOT}/web/packages/onnxtrain/tests/fixtures/${script}`, FIXTURES], { stdio: "inherit" });
  }
}
