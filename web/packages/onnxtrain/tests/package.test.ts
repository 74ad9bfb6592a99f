import { execFileSync } from "node:child_process";
import { expect, test } from "vitest";
import { ROOT } from "./support.js";

test("npm pack builds what it packs, as it is called in a clone", () => {
  const folder = `${ROOT}/web/packages/onnxtrain`;
  const told = execFileSync("npm", ["pack", "--dry-run", "--json"], { cwd: folder, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] });
  // What the build says comes first.
  const [{ files }] = JSON.parse(told.slice(told.indexOf("[\n"))) as [{ files: { path: string }[] }];
  const names = files.map((f) => f.path);
  for (const name of ["package.json", "README.md", "LICENSE", "dist/index.js", "dist/index.d.ts", "dist/worker.js"]) {
    expect(names).toContain(name);
  }
  expect(names.filter((n) => n.startsWith("src/") || n.startsWith("tests/"))).toEqual([]);
});
