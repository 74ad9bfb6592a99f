/** A live mel spectrogram of the microphone: frequency from bottom to top, time from left to right. */
import { requestMedia } from "../runner/camera.js";

const SIZE = 64;
/** Time per column in ms; range of levels in dB; range of frequencies in Hz. */
const EVERY = 16;
const [QUIET, LOUD] = [-95, -30];
const [LOW, HIGH] = [80, 8000];
const mel = (hertz: number) => Math.log10(1 + hertz / 700);
const hertz = (m: number) => 700 * (10 ** m - 1);

/** Converts a spectrum in dB to the brightness of 64 mel bands, highest first. */
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

/** Records the microphone; `spectrogram` returns the last second. */
export class Listener {
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

  static async open(): Promise<Listener> {
    if (!navigator.mediaDevices?.getUserMedia) throw new Error("the microphone is not available: it needs a secure context (https)");
    const audio = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
    return new Listener(await requestMedia({ audio }, "microphone"));
  }

  spectrogram(): ImageData {
    const image = new ImageData(SIZE, SIZE);
    this.#columns.forEach((column, x) => column.forEach((v, y) => image.data.set([v, v, v, 255], 4 * (SIZE * y + x))));
    return image;
  }

  close(): void {
    clearInterval(this.#timer);
    this.#close();
  }
}
