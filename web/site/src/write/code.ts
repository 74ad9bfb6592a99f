
/** The program behind the page, as one would write it. */
export const program = (rate: string, temperature: string, device: string): string => `import { Trainer } from "onnxtrain";

// What make_artifacts.py built from models/writer.py with loss="causal_lm".
const trainer = await Trainer.create({ artifacts: "./art/writer/", device: "${device}" });
trainer.learningRate = ${rate};

const text = document.querySelector("textarea").value;
const characters = [...new Set(text)].slice(0, 127);
const numbers = [...text].map((c) => characters.indexOf(c) + 1); // 0: too rare

for (let step = 1; step <= 500; step++) {
  const rows = Array.from({ length: 16 }, () => {
    const start = Math.floor(Math.random() * (numbers.length - 63));
    return numbers.slice(start, start + 64);
  });
  const { loss } = await trainer.step({ ids: rows, labels: rows }); // the graph shifts the labels
  if (step % 50 === 0) console.log(step, loss, await write(160));
}

async function write(length, temperature = ${temperature}) {
  const written = [numbers[0]];
  for (let n = 0; n < length; n++) {
    const last = written.slice(-64);
    const { logits } = await trainer.predict({ ids: [[...last, ...Array(64 - last.length).fill(0)]] });
    const row = logits.data.subarray((last.length - 1) * 128, last.length * 128);
    const weights = characters.map((_, i) => Math.exp(row[i + 1] / temperature));
    let rest = Math.random() * weights.reduce((a, b) => a + b);
    written.push(1 + Math.max(0, weights.findIndex((w) => (rest -= w) <= 0)));
  }
  return written.map((i) => characters[i - 1]).join("");
}

const model = await trainer.exportModel(); // bytes of an .onnx file for any runtime
`;

export const python = `"""Builds what the page trains: python build_writer.py"""
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
