/** The code listings of the page. */
export const program = (rate: string, temperature: string, device: string): string => `import { Trainer } from "onnxtrain";

// Built by make_artifacts.py from models/writer.py with loss="causal_lm".
const trainer = await Trainer.create({ artifacts: "./art/writer/", device: "${device}" });
trainer.learningRate = ${rate};

const text = document.querySelector("textarea").value;
const characters = [...new Set(text)].slice(0, 127);
const ids = [...text].map((c) => characters.indexOf(c) + 1); // 0: unknown

for (let step = 1; step <= 500; step++) {
  const rows = Array.from({ length: 16 }, () => {
    const start = Math.floor(Math.random() * (ids.length - 63));
    return ids.slice(start, start + 64);
  });
  const { loss } = await trainer.step({ ids: rows, labels: rows }); // the graph shifts the labels
  if (step % 50 === 0) console.log(step, loss, await generate(160));
}

async function generate(length, temperature = ${temperature}) {
  const generated = [ids[0]];
  for (let n = 0; n < length; n++) {
    const last = generated.slice(-64);
    const { logits } = await trainer.predict({ ids: [[...last, ...Array(64 - last.length).fill(0)]] });
    const row = logits.data.subarray((last.length - 1) * 128, last.length * 128);
    const weights = characters.map((_, i) => Math.exp(row[i + 1] / temperature));
    let rest = Math.random() * weights.reduce((a, b) => a + b);
    generated.push(1 + Math.max(0, weights.findIndex((w) => (rest -= w) <= 0)));
  }
  return generated.map((i) => characters[i - 1]).join("");
}

const model = await trainer.exportModel(); // an ONNX file for any runtime
`;

export const python = `"""Build the artifacts of this page: python build_writer.py"""
import onnxtrain
from models.writer import writer  # web/site/models/writer.py

onnxtrain.build(
    writer(),  # ids [batch, 64] -> logits [batch, 64, 128]
    loss="causal_lm",
    optimizer="adamw",
    freeze="mask",
    target="web",
).save("art/writer")
`;
