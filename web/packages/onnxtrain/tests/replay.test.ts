import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, expect, test } from "vitest";
import { CheckpointError, createHead, readCheckpoint, ReplayBuffer, ShapeError, Trainer, writeCheckpoint } from "../src/index.js";
import { runPython } from "./support.js";

const folder = mkdtempSync(join(tmpdir(), "onnxtrain-"));
afterAll(() => rmSync(folder, { recursive: true }));

/** Rows whose elements are their number. */
const rows = (start: number, count: number) => ({
  x: { data: Float32Array.from({ length: 2 * count }, (_, i) => start + (i >> 1)), dims: [count, 2] },
  labels: BigInt64Array.from({ length: count }, (_, i) => BigInt(start + i)),
});

test("the buffer is a uniform sample within its limit", () => {
  const counts = new Array<number>(200).fill(0);
  for (let seed = 0; seed < 300; seed++) {
    const buffer = new ReplayBuffer({ maxBytes: 16 * 40 + 9, seed: 1000 * seed });
    for (const [start, count] of [[0, 13], [13, 0], [13, 87], [100, 100]] as const) buffer.add(rows(start, count), count);
    expect([buffer.size, buffer.seen]).toEqual([40, 200]);
    const { x, labels } = buffer.rows;
    expect(x!.dims).toEqual([40, 2]);
    const picked = Array.from(labels!.data as BigInt64Array, Number);
    expect(new Set(picked).size).toBe(40);
    expect([...x!.data]).toEqual(picked.flatMap((n) => [n, n]));
    for (const n of picked) counts[n]!++;
  }
  // 60 of 300 are expected for each row, with a standard deviation of 7.
  expect(Math.min(...counts)).toBeGreaterThan(30);
  expect(Math.max(...counts)).toBeLessThan(90);
  for (const at of [0, 50, 100, 150]) expect(Math.abs(counts.slice(at, at + 50).reduce((a, b) => a + b) / 50 - 60)).toBeLessThan(4);
});

test("new rows and those of the buffer train together", () => {
  const buffer = new ReplayBuffer({ maxBytes: 1000 });
  buffer.add({ x: new Float32Array(8), labels: Uint8Array.of(0, 1, 2, 3) }, 4);
  const { x, labels } = buffer.mix({ x: Float32Array.of(5, 6), labels: Uint8Array.of(9) }, 1);
  expect([x!.dims, [...x!.data]]).toEqual([[5, 2], [5, 6, 0, 0, 0, 0, 0, 0, 0, 0]]);
  expect([...labels!.data]).toEqual([9, 0, 1, 2, 3]);
  expect(() => buffer.mix({ x: Float32Array.of(5, 6, 7), labels: Uint8Array.of(9) }, 1)).toThrow(/x float32\[3\].*expected .*x float32\[2\]/);
  expect(() => buffer.add({ x: { data: new Float32Array(3), dims: [1, 2] }, labels: Uint8Array.of(9) }, 1)).toThrow(ShapeError);
  expect(() => new ReplayBuffer({ maxBytes: 7 }).add(rows(0, 1), 1)).toThrow("a row has more than maxBytes: 7");
});

test("checkpoints contain the buffer, in Python too", async () => {
  const artifacts = await createHead({ inputs: 2, classes: 3 });
  const trainer = await Trainer.create({ artifacts, device: "node", threads: 1 });
  trainer.replay = new ReplayBuffer({ maxBytes: 16 * 30, seed: 4 });
  trainer.replay.add(rows(0, 100), 100);
  const path = join(folder, "a.safetensors");
  await trainer.save(path);
  const other = await Trainer.create({ artifacts, device: "node", threads: 1 });
  await other.load(path);
  trainer.replay.add(rows(100, 50), 50);
  other.replay!.add(rows(100, 50), 50);
  expect(other.replay!.rows).toEqual(trainer.replay.rows);
  const { tensors, meta } = await readCheckpoint(await other.exportCheckpoint());
  await expect(trainer.importCheckpoint(await writeCheckpoint(tensors, new Map([...meta, ["replay", "{}"]])))).rejects.toThrow(CheckpointError);
  const python = runPython(
    `
import json, sys
from onnxtrain import ReplayBuffer
from onnxtrain.checkpoint import load_checkpoint
tensors, meta = load_checkpoint(sys.argv[1])
buffer = ReplayBuffer.restore(tensors, meta, "checkpoint")
print(json.dumps([len(buffer), buffer.seen, buffer.max_bytes, buffer.rows["labels"].tolist(), list(buffer.rows["x"].shape)]))
`,
    path,
  );
  const labels = Array.from(tensors.get("replay/labels")!.data as BigInt64Array, Number);
  expect(JSON.parse(python)).toEqual([30, 100, 480, expect.any(Array), [30, 2]]);
  expect(labels.length).toBe(30);
  await Promise.all([trainer, other].map((t) => t.dispose()));
});
