/** The network of the playground. It is tiny, so it runs in the main thread. */
import { createHead, Trainer, type HeadOptions } from "onnxtrain";
import { softmax } from "../shell/softmax.js";
import { PLANE } from "./field.js";
import { random, type Points } from "./points.js";

export type Activation = NonNullable<HeadOptions["activation"]>;

export interface Shape {
  readonly classes: number;
  readonly hidden: readonly number[];
  readonly activation: Activation;
  readonly decay: number;
  readonly seed: number;
}

/** Parameters of one layer; `weight[out][in]` is flat. */
export interface Layer {
  readonly weight: Float32Array;
  readonly bias: Float32Array;
}

const ACTIVATIONS: Record<Activation, (v: number) => number> = {
  tanh: Math.tanh,
  relu: (v) => Math.max(0, v),
  sigmoid: (v) => 1 / (1 + Math.exp(-v)),
  gelu: (v) => 0.5 * v * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (v + 0.044715 * v ** 3))),
};

/** Returns the options of `createHead`, also for the code panel. */
export const headOptions = ({ classes, hidden, activation, decay, seed }: Shape): HeadOptions =>
  ({ inputs: 2, classes, hidden, activation, seed, optimizer: { name: "adamw", weightDecay: decay } });

export class Net {
  #next: () => number;

  private constructor(readonly trainer: Trainer, readonly shape: Shape) {
    this.#next = random(shape.seed + 1);
  }

  static async open(shape: Shape): Promise<Net> {
    const artifacts = await createHead(headOptions(shape));
    return new Net(await Trainer.create({ artifacts, device: "wasm", worker: false }), shape);
  }

  /** Trains on a random batch of points. */
  async step(points: Points, batch: number, rate: number): Promise<number> {
    const n = points.labels.length;
    const size = Math.min(batch, n);
    const x = new Float32Array(2 * size);
    const labels = new Int32Array(size);
    for (let i = 0; i < size; i++) {
      const r = Math.floor(this.#next() * n);
      x.set(points.x.subarray(2 * r, 2 * r + 2), 2 * i);
      labels[i] = points.labels[r]!;
    }
    this.trainer.learningRate = rate;
    return (await this.trainer.step({ x, labels })).loss;
  }

  /** Returns loss and accuracy on points. */
  async evaluate(points: Points): Promise<{ loss: number; accuracy: number }> {
    const { loss, accuracy } = await this.trainer.evaluate({ x: points.x, labels: Int32Array.from(points.labels) }, { batchSize: points.labels.length });
    return { loss, accuracy: accuracy! };
  }

  /** Returns the class probabilities on the grid of the plane. */
  async plane(): Promise<Float32Array> {
    const { logits } = await this.trainer.predict({ x: PLANE });
    return softmax(logits!.data as Float32Array, this.shape.classes);
  }

  async layers(): Promise<Layer[]> {
    const value = async (name: string) => (await this.trainer.getParameter(name)).data as Float32Array;
    return await Promise.all([...this.shape.hidden, 0].map(async (_, i) => ({
      weight: await value(`layers.${i}.weight`), bias: await value(`layers.${i}.bias`),
    })));
  }

  /** Returns the activations of all hidden neurons on a grid of `side` x `side`, scaled to [-1, 1]. */
  neurons(layers: readonly Layer[], side: number): Float32Array[][] {
    const at = (i: number) => (2 * (i + 0.5)) / side - 1;
    let before = [0, 1].map((axis) => Float32Array.from({ length: side * side }, (_, i) => (axis ? -at(Math.floor(i / side)) : at(i % side))));
    const activate = ACTIVATIONS[this.shape.activation]!;
    return layers.slice(0, -1).map(({ weight, bias }) => {
      before = Array.from(bias, (b, out) => {
        const values = new Float32Array(side * side).fill(b);
        before.forEach((x, k) => {
          const w = weight[out * before.length + k]!;
          for (let i = 0; i < values.length; i++) values[i]! += w * x[i]!;
        });
        return values.map(activate);
      });
      return before.map((values) => scaled(values, this.shape.activation));
    });
  }

  async close(): Promise<void> {
    await this.trainer.dispose();
  }
}

/** Scales activations to [-1, 1]. */
function scaled(values: Float32Array, activation: Activation): Float32Array {
  if (activation === "sigmoid") return values.map((v) => 2 * v - 1);
  const most = activation === "tanh" ? 1 : values.reduce((a, v) => Math.max(a, Math.abs(v)), 1e-6);
  return values.map((v) => v / most);
}
