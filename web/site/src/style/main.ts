import { program, training } from "./code.js";
import { openCamera } from "../runner/camera.js";
import { type Floats, Runner } from "../runner/runner.js";
import { codePanel } from "../shell/code-panel.js";
import { $, attempt, download, fail, make, say, siteFile } from "../shell/dom.js";

/** Between pictures on a canvas and what the net takes. */

/** Returns the sizes of a painting: the longer side as asked for, both multiples of 4, as the net wants them. */
export function sizeFor(width: number, height: number, longer: number): [number, number] {
  const factor = longer / Math.max(width, height);
  const fit = (side: number) => Math.max(32, 4 * Math.round((side * factor) / 4));
  return [fit(width), fit(height)];
}

/** Returns pixels of a canvas as planes of red, green and blue, 0 to 255. */
export function planes({ data, width, height }: ImageData): Floats {
  const count = width * height;
  const out = new Float32Array(3 * count);
  for (let i = 0; i < count; i++) for (let c = 0; c < 3; c++) out[c * count + i] = data[4 * i + c]!;
  return { data: out, dims: [1, 3, height, width] };
}

/** Returns planes as pixels. */
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

/** Returns the picture, painted. */
export async function paint(net: Runner, picture: ImageData): Promise<ImageData> {
  const { styled } = await net.run({ image: planes(picture) });
  return pixels(styled!);
}

/** A picture, painted by the style-transfer net. */

const SAMPLES = [["china", "A pavilion by a lake"], ["flower", "A dahlia"]] as const;
/** The camera is painted at this size, so that pictures follow each other. */
const LIVE = 256;

type Picture = ImageBitmap | HTMLVideoElement;
const painted = $<HTMLCanvasElement>("painted");
const original = $<HTMLCanvasElement>("original");
const video = $<HTMLVideoElement>("camera");
const modelFile = siteFile("models/style.onnx");
const net = Runner.open(modelFile);
net.catch(fail);
let shown: ImageBitmap | undefined;
let closeCamera: (() => void) | undefined;
/** Counts what was asked for: only the newest answer is shown. */
let asked = 0;
/** Counts what a person chose: a picture that is still being loaded gives way to the next one. */
let chosen = 0;

const longer = () => Number(document.querySelector<HTMLInputElement>("#sizes :checked")!.value);
const sizeOf = (picture: Picture): [number, number] =>
  picture instanceof HTMLVideoElement ? [picture.videoWidth, picture.videoHeight] : [picture.width, picture.height];

function showSplit(): void {
  original.style.clipPath = `inset(0 ${100 - Number($<HTMLInputElement>("split").value)}% 0 0)`;
}

/** Paints a picture and shows both; gives how long it took, in ms, or nothing if another was asked for meanwhile. */
async function show(picture: Picture, side: number): Promise<number | undefined> {
  const mine = ++asked;
  const [width, height] = sizeFor(...sizeOf(picture), side);
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true })!;
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, width, height);
  const before = context.getImageData(0, 0, width, height);
  const model = await net;
  const start = performance.now();
  const after = await paint(model, before);
  const took = performance.now() - start;
  if (mine !== asked) return undefined;
  for (const [place, image] of [[painted, after], [original, before]] as const) {
    [place.width, place.height] = [width, height];
    place.getContext("2d", { willReadFrequently: true })!.putImageData(image, 0, 0);
  }
  $("easel").toggleAttribute("data-tall", height > width);
  return took;
}

async function still(picture: ImageBitmap): Promise<void> {
  shown = picture;
  say("The net paints ...");
  const took = await show(picture, longer());
  if (took !== undefined) say(`Painted ${painted.width} x ${painted.height} pixels in ${(took / 1000).toFixed(1)} s.`);
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
  say("Painting what the camera sees, as fast as this device can.");
  while (closeCamera === close) await show(video, Math.min(LIVE, longer()));
}

/** Opens the camera with its button disabled until it is on. */
async function openLive(): Promise<(() => void) | undefined> {
  const button = $<HTMLButtonElement>("live");
  const mine = ++chosen;
  button.disabled = true;
  try {
    const close = await openCamera(video);
    if (mine === chosen) return close;
    close();
    return undefined;
  } finally {
    button.disabled = false;
  }
}

async function fromFile(file: Blob | null | undefined): Promise<void> {
  if (!file) return;
  stopCamera();
  const mine = ++chosen;
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`${(file as File).name ?? "that"} is no picture that this browser can read`);
  });
  if (mine !== chosen) return;
  mark(undefined);
  await still(picture);
}

function mark(name: string | undefined): void {
  for (const button of $("samples").children) button.setAttribute("aria-pressed", String((button as HTMLElement).dataset["name"] === name));
}

async function sample(name: string): Promise<void> {
  stopCamera();
  const mine = ++chosen;
  const response = await fetch(siteFile(`style/${name}.jpg`));
  if (!response.ok) throw new Error(`the sample cannot be loaded: ${response.status}`);
  const picture = await createImageBitmap(await response.blob());
  if (mine !== chosen) return;
  mark(name);
  await still(picture);
}

$("samples").append(...SAMPLES.map(([name, words]) => make(
  "button", { type: "button", "data-name": name, "aria-pressed": "false", "aria-label": words, onclick: () => void attempt(() => sample(name)) },
  make("img", { src: siteFile(`style/${name}.jpg`).href, alt: "" }),
)));
$<HTMLImageElement>("style-picture").src = siteFile("style/mosaic.jpg").href;
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
  const blob = await new Promise<Blob | null>((resolve) => painted.toBlob(resolve, "image/png"));
  download("painting.png", new Uint8Array(await blob!.arrayBuffer()));
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
  note: "The page does this with a worker around it. The second program is how the net came to be.",
  listings: [{ name: "paint.js", text: () => program(longer()) }, { name: "train.py", text: () => training }],
  products: [{ name: "style.onnx", about: "pictures [batch, 3, height, width] of 0 to 255, sides multiples of 4", bytes: async () => new Uint8Array(await (await fetch(modelFile)).arrayBuffer()) }],
});
showSplit();
void attempt(() => sample("china"));
