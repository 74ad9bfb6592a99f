const find = (id) => document.getElementById(id);
const [file, style, size, device] = ["file", "style", "size", "device"].map(find);
const say = (text) => (find("status").textContent = text);
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
let picture;
let asked = 0;

const styles = await (await fetch("./models/styles.json")).json();
style.replaceChildren(...styles.map((s) => new Option(s.name, s.file)));

/** Draws the picture so that both sides are multiples of 4, which the net gives back unchanged. */
function pixels() {
  const factor = Number(size.value) / Math.max(picture.width, picture.height);
  const [width, height] = [picture.width, picture.height].map((n) => Math.max(16, Math.round((n * factor) / 4) * 4));
  const canvas = find("before");
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, width, height);
  return context.getImageData(0, 0, width, height);
}

function restyle() {
  if (!picture) return;
  const image = pixels();
  asked += 1;
  say("Working ...");
  worker.postMessage({ asked, image, device: device.value, model: new URL(`./models/${style.value}`, location.href).href });
}

worker.onmessage = ({ data }) => {
  if (data.asked !== asked) return; // of a choice that was changed meanwhile
  if (data.error) return say(`This did not work: ${data.error}`);
  const canvas = find("after");
  Object.assign(canvas, { width: data.image.width, height: data.image.height });
  canvas.getContext("2d").putImageData(data.image, 0, 0);
  canvas.toBlob((blob) => {
    URL.revokeObjectURL(find("save").href);
    Object.assign(find("save"), { href: URL.createObjectURL(blob), hidden: false });
  });
  say(`${data.image.width} x ${data.image.height} in ${(data.ms / 1000).toFixed(2)} s on ${data.device}.`);
};

async function take(blob) {
  try {
    picture = await createImageBitmap(blob);
  } catch {
    return say("This is no picture that the browser can read.");
  }
  restyle();
}

file.onchange = () => file.files[0] && take(file.files[0]);
for (const control of [style, size, device]) control.onchange = restyle;
document.ondragover = (event) => event.preventDefault();
document.ondrop = (event) => {
  event.preventDefault();
  if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
};
