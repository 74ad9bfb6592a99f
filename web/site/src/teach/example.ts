/** Generated example images, to try the page without a camera. */
import { SIZE } from "./backbone.js";

const between = (a: number, b: number) => a + (b - a) * Math.random();
type Context = OffscreenCanvasRenderingContext2D;

function star(context: Context, points: number, inner: number): void {
  context.beginPath();
  for (let i = 0; i < 2 * points; i++) {
    const radius = (i % 2 ? inner : 1) * 0.62;
    context.lineTo(radius * Math.cos((Math.PI * i) / points), radius * Math.sin((Math.PI * i) / points));
  }
  context.fill();
}

/** Drawing functions by class name; each fills a square from -1 to 1. */
export const DRAWINGS: Readonly<Record<string, (context: Context) => void>> = {
  Balls: (context) => {
    context.beginPath();
    context.arc(0, 0, 0.6, 0, 7);
    context.fill();
  },
  Stars: (context) => star(context, 5, 0.42),
  Stripes: (context) => {
    for (let i = -4; i < 5; i++) context.fillRect(-1.5, i / 3, 3, 1 / 6);
  },
};

/** Draws an example with random color, position and size. */
export function draw(name: string): ImageData {
  const context = new OffscreenCanvas(SIZE, SIZE).getContext("2d")!;
  context.fillStyle = `hsl(${between(0, 360)} ${between(10, 40)}% ${between(70, 92)}%)`;
  context.fillRect(0, 0, SIZE, SIZE);
  context.translate(SIZE * between(0.38, 0.62), SIZE * between(0.38, 0.62));
  context.rotate(between(-0.4, 0.4));
  const scale = (SIZE / 2) * between(0.75, 1.05);
  context.scale(scale, scale);
  context.fillStyle = `hsl(${between(0, 360)} 70% ${between(25, 45)}%)`;
  DRAWINGS[name]!(context);
  return context.getImageData(0, 0, SIZE, SIZE);
}
