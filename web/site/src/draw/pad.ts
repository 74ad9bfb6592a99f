/** A canvas to draw on with a pointer or keys; returns the drawing like the digits: small and centered. */
export class Pad {
  readonly #canvas: HTMLCanvasElement;
  readonly #pen: CanvasRenderingContext2D;
  readonly #onChange: () => void;
  #drawing = false;
  empty = true;

  constructor(canvas: HTMLCanvasElement, onChange: () => void) {
    this.#canvas = canvas;
    this.#onChange = onChange;
    this.#pen = canvas.getContext("2d", { willReadFrequently: true })!;
    this.#pen.lineWidth = canvas.width / 9;
    this.#pen.lineCap = this.#pen.lineJoin = "round";
    this.#pen.strokeStyle = "white";
    const at = (event: PointerEvent): [number, number] => {
      const box = canvas.getBoundingClientRect();
      return [
        ((event.clientX - box.left) * canvas.width) / box.width,
        ((event.clientY - box.top) * canvas.height) / box.height,
      ];
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.#drawing = true;
      this.#pen.beginPath();
      this.#pen.moveTo(...at(event));
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.#drawing) return;
      this.#pen.lineTo(...at(event));
      this.#inked();
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (this.#drawing = false));
    this.#byKeys();
  }

  #byKeys(): void {
    const { width, height } = this.#canvas;
    let [x, y] = [width / 2, height / 2];
    this.#canvas.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.clear();
      const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!direction) return;
      event.preventDefault();
      const from: [number, number] = [x, y];
      x = Math.min(width, Math.max(0, x + direction[0]! * 8));
      y = Math.min(height, Math.max(0, y + direction[1]! * 8));
      if (event.shiftKey) return;
      this.#pen.beginPath();
      this.#pen.moveTo(...from);
      this.#pen.lineTo(x, y);
      this.#inked();
    });
  }

  #inked(): void {
    this.empty = false;
    this.#pen.stroke();
    this.#onChange();
  }

  clear(): void {
    this.#pen.clearRect(0, 0, this.#canvas.width, this.#canvas.height);
    this.empty = true;
    this.#onChange();
  }

  /** Returns the drawing as pixel values from 0 to 1. */
  pixels(size: number): Float32Array {
    return downscale(this.#pen, size);
  }

  /** Returns the drawing and randomly rotated, sheared and scaled variants. */
  variants(size: number, count: number): Float32Array[] {
    const { width, height } = this.#canvas;
    const other = document.createElement("canvas");
    [other.width, other.height] = [width, height];
    const pen = other.getContext("2d", { willReadFrequently: true })!;
    const spread = (by: number) => by * (2 * Math.random() - 1);
    return Array.from({ length: count }, (_, i) => {
      if (i === 0) return this.pixels(size);
      const [rotation, shear, scaleX, scaleY] = [spread(0.2), spread(0.2), 0.78 + spread(0.14), 0.78 + spread(0.14)];
      pen.setTransform(1, 0, 0, 1, 0, 0);
      pen.clearRect(0, 0, width, height);
      pen.translate(width / 2, height / 2);
      pen.transform(scaleX * Math.cos(rotation), scaleX * Math.sin(rotation), shear - scaleY * Math.sin(rotation), scaleY * Math.cos(rotation), 0, 0);
      pen.drawImage(this.#canvas, -width / 2, -height / 2);
      return downscale(pen, size);
    });
  }
}

/** Crops the drawing, centers it and scales it down by averaging. */
function downscale(pen: CanvasRenderingContext2D, size: number): Float32Array {
  const { width, height } = pen.canvas;
  const ink = pen.getImageData(0, 0, width, height).data;
  const value = (x: number, y: number) =>
    x < 0 || y < 0 || x >= width || y >= height ? 0 : ink[4 * (y * width + x) + 3]! / 255;
  let [left, right, top, bottom] = [width, 0, height, 0];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (value(x, y) < 0.5) continue;
      [left, right] = [Math.min(left, x), Math.max(right, x)];
      [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
    }
  }
  const out = new Float32Array(size * size);
  if (left > right) return out;
  // The 8x8 digits fill their images; MNIST digits have a margin of four pixels.
  const inner = size < 16 ? size : size - 8;
  const cell = Math.max((bottom - top) / inner, (right - left) / (inner - 1), 4);
  const [x0, y0] = [((left + right) - size * cell) / 2, ((top + bottom) - size * cell) / 2];
  const samples = 6;
  for (let i = 0; i < size * size; i++) {
    let sum = 0;
    for (let s = 0; s < samples * samples; s++) {
      const x = x0 + ((i % size) + ((s % samples) + 0.5) / samples) * cell;
      const y = y0 + (Math.floor(i / size) + (Math.floor(s / samples) + 0.5) / samples) * cell;
      sum += value(Math.floor(x), Math.floor(y));
    }
    out[i] = sum / samples ** 2;
  }
  return out;
}
