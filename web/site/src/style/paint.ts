/** Between pictures on a canvas and what the net takes. */
import type { Floats, Runner } from "../runner/runner.js";

/** Gives the sizes of a painting: the longer side as asked for, both multiples of 4, as the net wants them. */
export function sizeFor(width: number, height: number, longer: number): [number, number] {
  const factor = longer / Math.max(width, height);
  const fit = (side: number) => Math.max(32, 4 * Math.round((side * factor) / 4));
  return [fit(width), fit(height)];
}

/** Gives pixels of a canvas as planes of red, green and blue, 0 to 255. */
export function planes({ data, width, height }: ImageData): Floats {
  const count = width * height;
  const out = new Float32Array(3 * count);
  for (let i = 0; i < count; i++) for (let c = 0; c < 3; c++) out[c * count + i] = data[4 * i + c]!;
  return { data: out, dims: [1, 3, height, width] };
}

/** Gives planes as pixels. */
export function pixels({ data, dims }: Floats): ImageData {
  const [height, width] = [dims[2]!, dims[3]!];
  const image = new ImageData(width, height);
  const count = width * height;
  for (let i = 0; i < count; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = data[c * count + i]!;
    image.data[4 * i + 3] = 255;
  }
  return image;
}

/** Gives the picture, painted. */
export async function paint(net: Runner, picture: ImageData): Promise<ImageData> {
  const { styled } = await net.run({ image: planes(picture) });
  return pixels(styled!);
}
