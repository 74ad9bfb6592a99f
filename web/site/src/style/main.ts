import { program, training } from "./code.js";
import { openCamera } from "../runner/camera.js";
import { type Floats, Runner } from "../runner/runner.js";
import { codePanel } from "../shell/code-panel.js";
import { $, attempt, download, fail, make, say, siteFile } from "../shell/dom.js";

// Conversion between canvas images and tensors.

/** Returns the output size with the given longer side; the network needs multiples of 4. */
export function sizeFor(width: number, height: number, longer: number): [number, number] {
  const factor = longer / Math.max(width, height);
  const fit = (side: number) => Math.max(32, 4 * Math.round((side * factor) / 4));
  return [fit(width), fit(height)];
}

/** Converts an image to a tensor [1, 3, height, width] with values from 0 to 255. */
export function toTensor({ data, width, height }: ImageData): Floats {
  const count = width * height;
  const out = new Float32Array(3 * count);
  for (let i = 0; i < count; i++) for (let c = 0; c < 3; c++) out[c * count + i] = data[4 * i + c]!;
  return { data: out, dims: [1, 3, height, width] };
}

/** Converts a tensor to an image. */
export function toImage({ data, dims }: Floats): ImageData {
  const [height, width] = [dims[2]!, dims[3]!];
  const image = new ImageData(width, height);
  const count = width * height;
  for (let i = 0; i < count; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = data[c * count + i]!;
    image.data[4 * i + 3] = 255;
  }
  return image;
}

/** Returns the stylized image. */
export async function stylize(net: Runner, image: ImageData): Promise<ImageData> {
  const { styled } = await net.run({ image: toTensor(image) });
  return toImage(styled!);
}

const SAMPLES = [["china", "A pavilion by a lake"], ["flower", "A dahlia"]] as const;
/** Output size for the camera, small enough for a live view. */
const LIVE = 256;

type Source = ImageBitmap | HTMLVideoElement;
const stylized = $<HTMLCanvasElement>("stylized");
const original = $<HTMLCanvasElement>("original");
const video = $<HTMLVideoElement>("camera");
const modelFile = siteFile("models/style.onnx");
const net = Runner.open(modelFile);
net.catch(fail);
let shown: ImageBitmap | undefined;
let closeCamera: (() => void) | undefined;
/** Number of the newest request: results of older requests are dropped. */
let newestRequest = 0;
/** Number of the newest selection: an image that is still loading is dropped when another one is selected. */
let newestSelection = 0;

const longer = () => Number(document.querySelector<HTMLInputElement>("#sizes :checked")!.value);
const sizeOf = (source: Source): [number, number] =>
  source instanceof HTMLVideoElement ? [source.videoWidth, source.videoHeight] : [source.width, source.height];

function showSplit(): void {
  original.style.clipPath = `inset(0 ${100 - Number($<HTMLInputElement>("split").value)}% 0 0)`;
}

/** Stylizes an image and shows both; returns the time in ms, or `undefined` if there was a newer request. */
async function show(source: Source, side: number): Promise<number | undefined> {
  const request = ++newestRequest;
  const [width, height] = sizeFor(...sizeOf(source), side);
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true })!;
  context.imageSmoothingQuality = "high";
  context.drawImage(source, 0, 0, width, height);
  const before = context.getImageData(0, 0, width, height);
  const model = await net;
  const start = performance.now();
  const after = await stylize(model, before);
  const took = performance.now() - start;
  if (request !== newestRequest) return undefined;
  for (const [target, image] of [[stylized, after], [original, before]] as const) {
    [target.width, target.height] = [width, height];
    target.getContext("2d", { willReadFrequently: true })!.putImageData(image, 0, 0);
  }
  $("easel").toggleAttribute("data-tall", height > width);
  return took;
}

async function still(source: ImageBitmap): Promise<void> {
  shown = source;
  say("Stylizing ...");
  const took = await show(source, longer());
  if (took !== undefined) say(`Stylized ${stylized.width} x ${stylized.height} pixels in ${(took / 1000).toFixed(1)} s.`);
}

function stopCamera(): void {
  closeCamera?.();
  closeCamera = undefined;
  $("live").textContent = "Use the camera";
  $("live").setAttribute("aria-pressed", "false");
}

async function startCamera(): Promise<void> {
  const close = await openLive();
  if (!close) return;
  video.hidden = false;
  closeCamera = close;
  mark(undefined);
  $("live").textContent = "Stop the camera";
  $("live").setAttribute("aria-pressed", "true");
  say("Stylizing the camera at the maximum frame rate of this device.");
  while (closeCamera === close) await show(video, Math.min(LIVE, longer()));
}

/** Opens the camera with its button disabled until it is on. */
async function openLive(): Promise<(() => void) | undefined> {
  const button = $<HTMLButtonElement>("live");
  const request = ++newestSelection;
  button.disabled = true;
  try {
    const close = await openCamera(video);
    if (request === newestSelection) return close;
    close();
    return undefined;
  } finally {
    button.disabled = false;
  }
}

async function fromFile(file: Blob | null | undefined): Promise<void> {
  if (!file) return;
  stopCamera();
  const request = ++newestSelection;
  const source = await createImageBitmap(file).catch(() => {
    throw new Error(`cannot decode ${(file as File).name ?? "the file"} as an image`);
  });
  if (request !== newestSelection) return;
  mark(undefined);
  await still(source);
}

function mark(name: string | undefined): void {
  for (const button of $("samples").children) button.setAttribute("aria-pressed", String((button as HTMLElement).dataset["name"] === name));
}

async function sample(name: string): Promise<void> {
  stopCamera();
  const request = ++newestSelection;
  const response = await fetch(siteFile(`style/${name}.jpg`));
  if (!response.ok) throw new Error(`the sample cannot be loaded: ${response.status}`);
  const source = await createImageBitmap(await response.blob());
  if (request !== newestSelection) return;
  mark(name);
  await still(source);
}

$("samples").append(...SAMPLES.map(([name, label]) => make(
  "button", { type: "button", "data-name": name, "aria-pressed": "false", "aria-label": label, onclick: () => void attempt(() => sample(name)) },
  make("img", { src: siteFile(`style/${name}.jpg`).href, alt: "" }),
)));
$<HTMLImageElement>("style-image").src = siteFile("style/mosaic.jpg").href;
$<HTMLInputElement>("file").onchange = (event) => void attempt(() => fromFile((event.target as HTMLInputElement).files?.[0]));
$("live").onclick = () => void attempt(async () => {
  if (!closeCamera) return await startCamera();
  stopCamera();
  say("The camera is off.");
});
$("split").oninput = showSplit;
$("sizes").onchange = () => {
  panel.refresh();
  if (shown && !closeCamera) void attempt(() => still(shown!));
};
$("save").onclick = () => void attempt(async () => {
  const blob = await new Promise<Blob | null>((resolve) => stylized.toBlob(resolve, "image/png"));
  download("stylized.png", new Uint8Array(await blob!.arrayBuffer()));
});
addEventListener("paste", (event) => void attempt(() => fromFile([...(event.clipboardData?.files ?? [])][0])));
for (const kind of ["dragover", "dragleave", "drop"] as const) {
  addEventListener(kind, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") void attempt(() => fromFile(event.dataTransfer?.files[0]));
  });
}
addEventListener("pagehide", stopCamera);

const panel = codePanel($("code"), {
  note: "The page runs this in a worker. The second program is the training of the network.",
  listings: [{ name: "stylize.js", text: () => program(longer()) }, { name: "train.py", text: () => training }],
  products: [{ name: "style.onnx", about: "image [batch, 3, height, width] with values from 0 to 255; height and width are multiples of 4", bytes: async () => new Uint8Array(await (await fetch(modelFile)).arrayBuffer()) }],
});
showSplit();
void attempt(() => sample("china"));
