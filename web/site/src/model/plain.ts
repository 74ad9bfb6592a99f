/** A plain `.onnx` file: what it declares, and the command that adds loss and optimizer. */
import { type ModelNode, type ModelValue, type OnnxModel, readModel } from "onnxtrain";

export const LOSSES = ["cross_entropy", "nll", "bce_with_logits", "mse", "l1", "huber"] as const;
export type Loss = (typeof LOSSES)[number];

/** Operators between an activation and the output that move values only. */
const MOVES = ["Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose"];
const ACTIVATIONS = ["Softmax", "LogSoftmax", "Sigmoid"];
const FLOATS = ["float32", "float16", "bfloat16", "float64"];

export interface PlainModel {
  readonly name: string;
  readonly model: OnnxModel;
  /** The outputs that a loss can read. */
  readonly outputs: readonly ModelValue[];
  /** Number of elements of the float weights. */
  readonly parameters: number;
}

/** Reads a file; throws an error that says why the model cannot be trained. */
export function plainModel(name: string, file: Uint8Array): PlainModel {
  let model: OnnxModel;
  try {
    model = readModel(file);
  } catch (error) {
    throw new Error(`${name}: ${(error as Error).message}`);
  }
  const parameters = model.weights.filter((w) => FLOATS.includes(w.dtype)).reduce((n, w) => n + w.shape.reduce((a, b) => a * b, 1), 0);
  if (!parameters) {
    const trees = model.nodes.some((n) => n.type.startsWith("TreeEnsemble"));
    throw new Error(`${name}: no float weights to train${trees ? ": decision trees are not trained by gradients" : "; export the model with its weights inside"}`);
  }
  const outputs = model.outputs.filter((y) => FLOATS.includes(y.dtype));
  if (!outputs.length) throw new Error(`${name}: no float output for a loss; export the scores or probabilities too`);
  return { name, model, outputs, parameters };
}

const described = (v: ModelValue): string => `${v.name}: ${v.dtype}[${v.shape?.join(", ") ?? "unknown shape"}]`;

/** Returns rows for a table: what the file declares. */
export function facts({ model, parameters }: PlainModel): [string, string][] {
  const counts = new Map<string, number>();
  for (const n of model.nodes) counts.set(n.type, (counts.get(n.type) ?? 0) + 1);
  const tensors = model.weights.filter((w) => FLOATS.includes(w.dtype)).length;
  const common = [...counts].sort(([, a], [, b]) => b - a).slice(0, 5).map(([type, count]) => `${count} ${type}`);
  return [
    ["inputs", model.inputs.map(described).join("; ")],
    ["outputs", model.outputs.map(described).join("; ")],
    ["parameters", `${parameters.toLocaleString("en")} in ${tensors} ${tensors === 1 ? "tensor" : "tensors"}`],
    ["operators", `${model.nodes.length}: ${common.join(", ")}${counts.size > 5 ? ", ..." : ""}`],
    ["opset", `${model.opset}${model.producer ? `, written by ${model.producer}` : ""}`],
  ];
}

/** Returns the activation that an output ends in, if any. */
export function lastActivation(model: OnnxModel, output: string): string | undefined {
  const producers = new Map<string, ModelNode>(model.nodes.flatMap((n) => n.outputs.map((y) => [y, n] as const)));
  let at = producers.get(output);
  while (at && MOVES.includes(at.type)) at = producers.get(at.inputs[0]!);
  return at && ACTIVATIONS.includes(at.type) ? at.type : undefined;
}

/** Returns the likely loss of an output, and why. */
export function suggestLoss(model: OnnxModel, output: ModelValue): { loss: Loss; note: string } {
  const activation = lastActivation(model, output.name);
  if (activation === "Softmax") return { loss: "cross_entropy", note: `'${output.name}' ends in Softmax: cross_entropy reads the logits before it.` };
  if (activation === "LogSoftmax") return { loss: "nll", note: `'${output.name}' ends in LogSoftmax: nll reads log-probabilities.` };
  if (activation === "Sigmoid") return { loss: "bce_with_logits", note: `'${output.name}' ends in Sigmoid: bce_with_logits reads the logits before it.` };
  const width = output.shape && output.shape.length > 1 ? output.shape.at(-1) : 1;
  if (width === 1) return { loss: "mse", note: `'${output.name}' has one value per row: mse compares it with a number.` };
  return { loss: "cross_entropy", note: `For ${width} classes, labels are class indices from 0. For a regression, choose mse.` };
}

const quoted = (word: string): string => (/^[\w./:-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/** Returns the command that makes artifacts for this page. */
export function command({ name, outputs }: PlainModel, output: string, loss: Loss): string {
  const classes = loss === "cross_entropy" || loss === "nll";
  const words = ["onnxtrain", "build", quoted(name), "--loss", loss];
  if (outputs.length > 1) words.push("--loss-output", quoted(output));
  if (classes) words.push("--metric", "accuracy");
  return [...words, "--target", "web", "-o", "art/"].join(" ");
}
