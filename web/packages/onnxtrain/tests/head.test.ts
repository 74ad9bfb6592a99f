import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterAll, expect, test } from "vitest";
import { createHead, readCheckpoint, readModel, Trainer, writeCheckpoint, type Batch, type HeadOptions } from "../src/index.js";
import { runPython } from "./support.js";

const folder = mkdtempSync(join(tmpdir(), "head-"));
afterAll(() => rmSync(folder, { recursive: true }));

const STEPS = 20;
const ROWS = 8;
const HEADS: Record<string, HeadOptions> = {
  linear: { inputs: 6, classes: 3 },
  relu: { inputs: 10, classes: 4, hidden: [48], optimizer: { lr: 0.01 }, seed: 3 },
  tanh: { inputs: 1, classes: 2, hidden: [8, 8], activation: "tanh", optimizer: { name: "adam", lr: 0.02, weightDecay: 0.01 } },
  sigmoid: { inputs: 2, classes: 5, hidden: [7, 6, 5, 6, 7, 8], activation: "sigmoid", optimizer: { name: "sgd", lr: 0.5, momentum: 0.9 } },
  gelu: { inputs: 2000, classes: 3, hidden: [16], activation: "gelu", optimizer: { lr: 0.01 } },
  regression: { inputs: 3, outputs: 2, hidden: [12], optimizer: "adamw" },
  robust: { inputs: 3, outputs: 1, hidden: [12], loss: "huber", optimizer: { name: "sgd", lr: 0.1, momentum: 0.8, nesterov: true, weightDecay: 0.001 } },
  absolute: { inputs: 3, outputs: 1, loss: "l1", optimizer: { name: "sgd", lr: 0.1 } },
  labels: { inputs: 5, classes: 4, hidden: [9], loss: "bce_with_logits", optimizer: { lr: 0.01 } },
  fixed: { inputs: 4, outputs: 2, hidden: [5], batch: ROWS },
};

/** Returns deterministic batches, which Python gets as JSON. */
function batches({ inputs, classes, outputs, loss }: HeadOptions): Batch[] {
  const width = (classes ?? outputs)!;
  return Array.from({ length: STEPS }, (_, step): Batch => {
    const x = { data: Float32Array.from({ length: ROWS * inputs }, (_, i) => Math.fround(Math.sin(1 + 7 * i + 31 * step))), dims: [ROWS, inputs] };
    if (classes && !loss) {
      // Some labels are ignored.
      return { x, labels: Array.from({ length: ROWS }, (_, i) => ((i + step) % 11 === 10 ? -100 : (i * 5 + step) % width)) };
    }
    const target = Float32Array.from({ length: ROWS * width }, (_, i) =>
      loss === "bce_with_logits" ? (i * 3 + step) % 2 : Math.fround(Math.cos(3 * i + step)));
    return { x, target: { data: target, dims: [ROWS, width] } };
  });
}

const COMPARED = `
import json, math, sys
import jsonschema, numpy as np, onnx
from importlib.resources import files
from onnxtrain import optim
from onnxtrain import build
from onnxtrain import Trainer

folder, text = sys.argv[1:]
schema = json.loads(files("onnxtrain").joinpath("manifest.schema.json").read_text())
result = {}
for name, (loss, inputs, rows) in json.loads(text).items():
    here = f"{folder}/{name}"
    manifest = json.loads(open(f"{here}/manifest.json").read())
    jsonschema.validate(manifest, schema)
    for m in manifest["models"]:
        onnx.checker.check_model(f"{here}/{m['file']}", full_check=True)
    given = dict(manifest["optimizer"])
    kind = getattr(optim, given.pop("name"))
    optimizer = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    metrics = ["accuracy"] if loss == "cross_entropy" else []
    out = {}
    for target in ("wasm", "webgpu"):
        build(f"{here}/inference_model.onnx", loss=loss, optimizer=optimizer, metrics=metrics, target=target).save(f"{here}/{target}")
        trainer = Trainer(f"{here}/{target}", threads=1)
        second = trainer.inputs[1]
        losses = []
        for batch in json.loads(open(f"{here}/batches.json").read()):
            x = np.array(batch["x"], np.float32).reshape(rows, inputs)
            y = batch[second]
            y = np.array(y) if second == "labels" else np.array(y, np.float32).reshape(rows, -1)
            losses.append(trainer.step(x, y).loss)
        weights = {p["name"]: trainer.view(p["name"]).astype(float).ravel().tolist() for p in manifest["parameters"]}
        predicted = trainer.predict(x)
        out[target] = {"losses": losses, "weights": weights, "predicted": next(iter(predicted.values())).ravel().tolist()}
    steps = (f"{here}/step_model.webgpu.onnx", f"{here}/webgpu/step_model.onnx")
    out["nodes"] = [len(onnx.load(file).graph.node) for file in steps]
    # Python's trainer also loads the files directly.
    own = Trainer(here, threads=1)
    out["own"] = own.step(x, y).loss
    result[name] = out
open(f"{folder}/result.json", "w").write(json.dumps(result))
`;

interface PythonRun {
  losses: number[];
  weights: Record<string, number[]>;
  predicted: number[];
}

/** Returns the largest absolute difference, relative to the largest value. */
function relative(a: ArrayLike<number>, b: ArrayLike<number>): number {
  if (a.length !== b.length) return Infinity;
  const size = Math.max(...Array.from(b, Math.abs), 1e-30);
  return Math.max(...Array.from(a, (v, i) => Math.abs(v - b[i]!))) / size;
}

/** Returns artifacts with the models of one target and the inference model. */
async function only(target: string, files: ReadonlyMap<string, Uint8Array>): Promise<Map<string, Uint8Array>> {
  const manifest = JSON.parse(new TextDecoder().decode(files.get("manifest.json"))) as { models: { target: string; role: string }[] };
  manifest.models = manifest.models.filter((m) => m.target === target || m.role === "infer");
  const { tensors } = await readCheckpoint(files.get("checkpoint")!);
  const text = new TextEncoder().encode(JSON.stringify(manifest));
  return new Map([...files, ["manifest.json", text], ["checkpoint", await writeCheckpoint(tensors, new Map())]]);
}

test("losses and parameters match artifacts built in Python, for both targets", async () => {
  const specs: Record<string, unknown> = {};
  for (const [name, options] of Object.entries(HEADS)) {
    const here = join(folder, name);
    mkdirSync(here);
    for (const [file, data] of await createHead(options)) writeFileSync(join(here, file), data);
    const plain = batches(options).map((b) => Object.fromEntries(Object.entries(b).map(([n, t]) => [n, Array.isArray(t) ? t : Array.from((t as { data: Float32Array }).data)])));
    writeFileSync(join(here, "batches.json"), JSON.stringify(plain));
    specs[name] = [options.loss ?? (options.classes ? "cross_entropy" : "mse"), options.inputs, ROWS];
  }
  runPython(COMPARED, folder, JSON.stringify(specs));
  const expected = JSON.parse(readFileSync(join(folder, "result.json"), "utf8")) as Record<string, Record<"wasm" | "webgpu", PythonRun> & { own: number; nodes: [number, number] }>;
  for (const [name, options] of Object.entries(HEADS)) {
    const fresh = await Trainer.create({ artifacts: join(folder, name), device: "node", threads: 1 });
    const { loss } = await fresh.step(batches(options).at(-1)!);
    expect(relative([loss], [expected[name]!.own]), `${name}: Python's trainer on these files`).toBeLessThan(1e-6);
    await fresh.dispose();
    // On WebGPU each node is a kernel launch.
    const [nodes, most] = expected[name]!.nodes;
    expect(nodes, `${name}: nodes of a step on WebGPU`).toBeLessThanOrEqual(most);
    // Both use the same operators with the same rounding: about eight roundings of 2^-23 remain after 20 steps.
    const tolerance = 1e-6;
    for (const target of ["wasm", "webgpu"] as const) {
      const theirs = expected[name]![target];
      const trainer = await Trainer.create({ artifacts: await only(target, await createHead(options)), device: "node", threads: 1 });
      const losses: number[] = [];
      for (const batch of batches(options)) losses.push((await trainer.step(batch)).loss);
      expect(relative(losses, theirs.losses), `${name} on ${target}: losses`).toBeLessThan(tolerance);
      for (const { name: weight } of trainer.parameters) {
        const { data } = await trainer.getParameter(weight);
        expect(relative(data as Float32Array, theirs.weights[weight]!), `${name} on ${target}: ${weight}`).toBeLessThan(tolerance);
      }
      const predicted = await trainer.predict({ x: batches(options).at(-1)!["x"]! });
      expect(relative(Object.values(predicted)[0]!.data as Float32Array, theirs.predicted)).toBeLessThan(2 * tolerance);
      await trainer.dispose();
    }
  }
});

test("fit, evaluate, checkpoints and the exported model work; multi-step calls match single steps", async () => {
  const options = HEADS["relu"]!;
  const all = batches(options);
  const trained: number[][] = [];
  for (const stepsPerCall of [1, undefined]) {
    const trainer = await Trainer.create({ artifacts: await createHead(options), device: "node", threads: 1 });
    const losses: number[] = [];
    for await (const { loss } of trainer.fit(all, { epochs: 2, stepsPerCall })) losses.push(loss);
    expect(losses).toHaveLength(2 * STEPS);
    trained.push(losses);
    const { loss, accuracy } = await trainer.evaluate(all);
    expect(loss).toBeLessThan(losses[0]!);
    expect(accuracy).toBeGreaterThan(1 / 4);
    const saved = await trainer.exportCheckpoint();
    const path = join(folder, "trained.onnx");
    writeFileSync(path, await trainer.exportModel());
    const x = all[0]!["x"] as { data: Float32Array };
    const { logits } = await trainer.predict({ x });
    const theirs = JSON.parse(runPython(
      `
import json, sys, numpy as np, onnx, onnxruntime
onnx.checker.check_model(sys.argv[1], full_check=True)
x = np.array(json.loads(sys.argv[2]), np.float32).reshape(${ROWS}, -1)
print(json.dumps(onnxruntime.InferenceSession(sys.argv[1]).run(["logits"], {"x": x})[0].ravel().tolist()))
`, path, JSON.stringify(Array.from(x.data)))) as number[];
    expect(relative(logits!.data as Float32Array, theirs)).toBeLessThan(1e-5);
    const again = await Trainer.create({ artifacts: await createHead({ ...options, seed: 9 }), device: "node", threads: 1 });
    await again.importCheckpoint(saved);
    expect((await again.predict({ x }))["logits"]!.data).toEqual(logits!.data);
    expect(again.globalStep).toBe(2 * STEPS);
    await again.dispose();
    await trainer.dispose();
  }
  expect(relative(trained[0]!, trained[1]!)).toBeLessThan(1e-6);
});

test("no head ends in Softmax or Sigmoid: its losses read logits, which is what the model returns", async () => {
  for (const [name, options] of Object.entries(HEADS)) {
    const { nodes, outputs } = readModel((await createHead(options)).get("inference_model.onnx")!);
    const last = nodes.find((n) => n.outputs.includes(outputs[0]!.name))!;
    expect(last.type, name).toMatch(/^(Gemm|Add|MatMul)$/);
    expect(nodes.map((n) => n.type), name).not.toContain("Softmax");
  }
});

test("initial weights depend on the seed only; labels that are out of range are rejected", async () => {
  const options = { inputs: 5, classes: 3, hidden: [4], seed: 7 };
  const [one, two, other] = [await createHead(options), await createHead(options), await createHead({ ...options, seed: 8 })];
  expect(one).toEqual(two);
  expect(other.get("checkpoint")).not.toEqual(one.get("checkpoint"));
  expect(other.get("step_model.onnx")).toEqual(one.get("step_model.onnx"));
  const trainer = await Trainer.create({ artifacts: one, device: "node" });
  const bound = 1 / Math.sqrt(5);
  const { data } = await trainer.getParameter("layers.0.weight");
  expect(Math.max(...Array.from(data as Float32Array, Math.abs))).toBeLessThanOrEqual(bound);
  expect(Math.max(...(data as Float32Array))).toBeGreaterThan(bound / 2);
  expect(Math.min(...(data as Float32Array))).toBeLessThan(-bound / 2);
  const x = new Float32Array(15);
  await expect(trainer.step({ x, labels: [0, 3, 1] })).rejects.toThrow("'labels' must be class indices in [0, 3), got 3 at row 1");
  await expect(trainer.step({ x, labels: [0, 2, -1] })).rejects.toThrow("'labels' must be class indices in [0, 3), got -1 at row 2");
  await trainer.dispose();
});

const refused: [object, string][] = [
  [{ inputs: 0, classes: 2 }, "'inputs' must be an integer >= 1, got 0"],
  [{ classes: 2 }, "'inputs' must be an integer >= 1, got nothing"],
  [{ inputs: 3 }, "pass either 'classes' or 'outputs'"],
  [{ inputs: 3, classes: 2, outputs: 2 }, "pass either 'classes' or 'outputs'"],
  [{ inputs: 3, classes: 1 }, "'classes' must be 2 or more with cross_entropy, got 1"],
  [{ inputs: 3, classes: 2.5 }, "'classes' must be an integer >= 1, got 2.5"],
  [{ inputs: 3, classes: 2, hidden: 8 }, "'hidden' must be a list of sizes, got 8"],
  [{ inputs: 3, classes: 2, hidden: [8, -1] }, "'hidden[1]' must be an integer >= 1, got -1"],
  [{ inputs: 3, classes: 2, hidden: [1e6, 1e6] }, "a layer of 1000000 x 1000000 is too large for a browser"],
  [{ inputs: 3, classes: 2, activation: "swish" }, "'activation' must be one of relu, tanh, sigmoid, gelu, got \"swish\""],
  [{ inputs: 3, classes: 2, loss: "crossentropy" }, "'loss' must be one of cross_entropy, bce_with_logits, mse, l1, huber, got \"crossentropy\""],
  [{ inputs: 3, classes: 2, optimizer: "lion" }, "'optimizer' must be one of adamw, adam, sgd, got \"lion\""],
  [{ inputs: 3, classes: 2, optimizer: { lr: -1 } }, "'optimizer.lr' must be a number >= 0, got -1"],
  [{ inputs: 3, classes: 2, optimizer: { lr: NaN } }, "'optimizer.lr' must be a number >= 0, got NaN"],
  [{ inputs: 3, classes: 2, optimizer: { lr: "" } }, "'optimizer.lr' must be a number >= 0, got \"\""],
  [{ inputs: 3, classes: 2, optimizer: { betas: [0.9, 1] } }, "'optimizer.betas' must be a number in [0, 1), got 1"],
  [{ inputs: 3, classes: 2, optimizer: { momentum: 0.9 } }, "unknown option of optimizer 'adamw': 'momentum'"],
  [{ inputs: 3, classes: 2, optimizer: { name: "sgd", nesterov: true } }, "'optimizer.momentum' must be above 0 with nesterov, got 0"],
  [{ inputs: 3, classes: 2, batch: 0 }, "'batch' must be an integer >= 1, got 0"],
  [{ inputs: 3, classes: 2, seed: -1 }, "'seed' must be an integer >= 0, got -1"],
  [{ inputs: 3, classes: 2, layers: 3 }, "unknown option: 'layers'"],
];

test.each(refused)("createHead rejects %j", async (options, message) => {
  await expect(createHead(options as HeadOptions)).rejects.toThrow(`createHead: ${message}`);
});
