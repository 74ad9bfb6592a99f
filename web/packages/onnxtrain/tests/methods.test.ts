/** Preference tuning, distillation, quantization and the like train in Node as in Python; `tests/test_methods_on_targets.py` has the methods. */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, expect, test } from "vitest";
import { type Batch, Trainer } from "../src/index.js";
import { distance, ROOT, runPython } from "./support.js";

const folder = mkdtempSync(join(tmpdir(), "onnxtrain-"));
afterAll(() => rmSync(folder, { recursive: true }));

test("artifacts of every method train on wasm as in Python", async () => {
  const methods = JSON.parse(runPython(
    `
import json, sys
sys.path.insert(0, sys.argv[1])
from tests.test_methods_on_targets import write
print(json.dumps(write(sys.argv[2])))
`,
    ROOT, folder,
  )) as Record<string, { losses: number[]; batch: Batch }>;
  expect(Object.keys(methods).length).toBeGreaterThan(8);
  for (const [name, { losses, batch }] of Object.entries(methods)) {
    const trainer = await Trainer.create({ artifacts: join(folder, name), device: "wasm", threads: 1 });
    const own: number[] = [];
    for (let i = 0; i < 3; i++) own.push((await trainer.step(batch)).loss);
    expect(distance(own, losses), name).toBeLessThan(1e-4);
    await trainer.dispose();
  }
});
