/** The frozen net: pictures become features. */
import { siteFile } from "../shell/dom.js";
import { Runner } from "../runner/runner.js";

export const SIZE = 64;

/** Gives the middle square of a picture, 64 x 64. */
export function small(picture: CanvasImageSource, width: number, height: number): ImageData {
  const side = Math.min(width, height);
  // In halves, so that no pixel of a large picture is left out.
  let source: CanvasImageSource = picture;
  let [x, y, now] = [(width - side) / 2, (height - side) / 2, side];
  for (;;) {
    const next = Math.max(SIZE, Math.ceil(now / 2));
    const canvas = new OffscreenCanvas(next, next);
    const context = canvas.getContext("2d", { willReadFrequently: next === SIZE })!;
    context.imageSmoothingQuality = "high";
    context.drawImage(source, x, y, now, now, 0, 0, next, next);
    if (next === SIZE) return context.getImageData(0, 0, SIZE, SIZE);
    [source, x, y, now] = [canvas, 0, 0, next];
  }
}

/** Gives pixels as the net takes them: planes of 0 to 1. */
export function planes({ data }: ImageData): Float32Array<ArrayBuffer> {
  const out = new Float32Array(3 * SIZE * SIZE);
  for (let i = 0; i < SIZE * SIZE; i++) for (let c = 0; c < 3; c++) out[c * SIZE * SIZE + i] = data[4 * i + c]! / 255;
  return out;
}

export class Eye {
  readonly #runner: Runner;
  /** The net itself, for the file that people take along. */
  readonly model: Uint8Array;

  private constructor(runner: Runner, model: Uint8Array) {
    this.#runner = runner;
    this.model = model;
  }

  static async open(): Promise<Eye> {
    const response = await fetch(siteFile("models/backbone.onnx"));
    if (!response.ok) throw new Error(`the net cannot be loaded: ${response.status}`);
    const model = new Uint8Array(await response.arrayBuffer());
    return new Eye(await Runner.of(model.slice()), model);
  }

  /** Gives the features of a picture. */
  async features(picture: ImageData): Promise<Float32Array> {
    const { x } = await this.#runner.run({ image: { data: planes(picture), dims: [1, 3, SIZE, SIZE] } });
    return x!.data;
  }
}
