import { execFileSync } from "node:child_process";
import { FIXTURES, python, ROOT } from "./support.js";

/** Makes what the tests compare with, if it is not there. */
export function setup(): void {
  const script = `${ROOT}/web/packages/onnxtrain/tests/fixtures/make_fixtures.py`;
  execFileSync(python(), [script, FIXTURES], { stdio: "inherit" });
}
