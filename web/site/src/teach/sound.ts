/** The last second of sound as a picture: pitch from bottom to top, time from left to right. */
import { allowed } from "../runner/camera.js";

const SIZE = 64;
/** Between columns, in ms; from the quietest that is shown to the loudest, in dB; lowest and highest pitch, in Hz. */
const EVERY = 16;
const [QUIET, LOUD] = [-95, -30];
const [LOW, HIGH] = [80, 8000];
const mel = (hertz: number) => Math.log10(1 + hertz / 700);
const hertz = (m: number) => 700 * (10 ** m - 1);

/** Returns how bright each of 64 bands of pitch is, high ones first, from the strengths of frequencies in dB. */
export function bands(decibels: Float32Array, rate: number): Uint8ClampedArray {
  const out = new Uint8ClampedArray(SIZE);
  const width = rate / 2 / decibels.length;
  const edge = (i: number) => hertz(mel(LOW) + ((mel(HIGH) - mel(LOW)) * i) / SIZE) / width;
  for (let i = 0; i < SIZE; i++) {
    let top = -Infinity;
    for (let k = Math.floor(edge(i)); k <= Math.max(Math.floor(edge(i)), Math.floor(edge(i + 1)) - 1); k++) top = Math.max(top, decibels[k] ?? -Infinity);
    out[SIZE - 1 - i] = (255 * (Math.max(top, QUIET) - QUIET)) / (LOUD - QUIET);
  }
  return out;
}

/** Listens; `picture` is the last second. */
export class Ear {
  readonly #columns: Uint8ClampedArray[] = Array.from({ length: SIZE }, () => new Uint8ClampedArray(SIZE));
  readonly #timer: ReturnType<typeof setInterval>;
  readonly #close: () => void;

  private constructor(stream: MediaStream) {
    const context = new AudioContext();
    const analyser = context.createAnalyser();
    analyser.fftSize = 2048;
    analyser.smoothingTimeConstant = 0.2;
    context.createMediaStreamSource(stream).connect(analyser);
    void context.resume();
    const decibels = new Float32Array(analyser.frequencyBinCount);
    this.#timer = setInterval(() => {
      analyser.getFloatFrequencyData(decibels);
      this.#columns.shift();
      this.#columns.push(bands(decibels, context.sampleRate));
    }, EVERY);
    this.#close = () => {
      stream.getTracks().forEach((t) => t.stop());
      void context.close();
    };
  }

  static async open(): Promise<Ear> {
    if (!navigator.mediaDevices?.getUserMedia) throw new Error("this browser gives no microphone to this page; a page needs https for that");
    const audio = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
    return new Ear(await allowed({ audio }, "microphone"));
  }

  picture(): ImageData {
    const image = new ImageData(SIZE, SIZE);
    this.#columns.forEach((column, x) => column.forEach((v, y) => image.data.set([v, v, v, 255], 4 * (SIZE * y + x))));
    return image;
  }

  close(): void {
    clearInterval(this.#timer);
    this.#close();
  }
}
