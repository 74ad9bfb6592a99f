const find = (id) => document.getElementById(id);
const [file, style, size, device] = ["file", "style", "size", "device"].map(find);
const say = (text) => (find("status").textContent = text);
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
let source;
let request = 0;

const styles = await (await fetch("./models/styles.json")).json();
style.replaceChildren(...styles.map((s) => new Option(s.name, s.file)));

/** Returns the pixels of the image, scaled so that both sides are multiples of 4: then the output has the same size. */
function pixels() {
  const factor = Number(size.value) / Math.max(source.width, source.height);
  const [width, height] = [source.width, source.height].map((n) => Math.max(16, Math.round((n * factor) / 4) * 4));
  const canvas = find("before");
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(source, 0, 0, width, height);
  return context.getImageData(0, 0, width, height);
}

function restyle() {
  if (!source) return;
  const image = pixels();
  request += 1;
  say("Working ...");
  worker.postMessage({ request, image, device: device.value, model: new URL(`./models/${style.value}`, location.href).href });
}

worker.onmessage = ({ data }) => {
  if (data.request !== request) return; // outdated: the settings changed meanwhile
  if (data.error) return say(`Failed: ${data.error}`);
  const canvas = find("after");
  Object.assign(canvas, { width: data.image.width, height: data.image.height });
  canvas.getContext("2d").putImageData(data.image, 0, 0);
  canvas.toBlob((blob) => {
    URL.revokeObjectURL(find("save").href);
    Object.assign(find("save"), { href: URL.createObjectURL(blob), hidden: false });
  });
  say(`${data.image.width} x ${data.image.height} in ${(data.ms / 1000).toFixed(2)} s on ${data.device}.`);
};

async function loadImage(blob) {
  try {
    source = await createImageBitmap(blob);
  } catch {
    return say("Failed: the browser cannot decode this image.");
  }
  restyle();
}

file.onchange = () => file.files[0] && loadImage(file.files[0]);
for (const control of [style, size, device]) control.onchange = restyle;
document.ondragover = (event) => event.preventDefault();
document.ondrop = (event) => {
  event.preventDefault();
  if (event.dataTransfer.files[0]) loadImage(event.dataTransfer.files[0]);
};
