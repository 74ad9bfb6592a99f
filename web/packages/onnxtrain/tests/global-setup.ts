import { execFileSync } from "node:child_process";
import { FIXTURES, python, ROOT } from "./support.js";

/** Makes what the tests compare with, if it is not there; KEEP_FIXTURES=1 takes it as it is. */
export function setup(): void {
  if (process.env["KEEP_FIXTURES"]) return;
  const script = `${ROOT}/web/packages/onnxtrain/tests/fixtures/make_fixtures.py`;
  execFileSync(python(), [script, FIXTURES], { stdio: "inherit" });
}
