/** The code listings of the page: training in a page and in Python. */
import type { Task } from "./task.js";

export interface RunSettings {
  readonly task: Task | undefined;
  readonly lr: string;
  readonly schedule: string;
  readonly batch: string;
  readonly epochs: string;
}

const names = (task: Task | undefined) => Object.keys(task?.fitted.columns ?? { x: 0, labels: 0 });

export function inPage({ task, lr, schedule, batch, epochs }: RunSettings): string {
  const columns = names(task).join(", ");
  return `import { ${schedule}, Trainer } from "onnxtrain";

const trainer = await Trainer.create({ artifacts: "./art/", device: "wasm" });

// Columns by the names of the model's inputs: typed arrays, or { data, dims }.
const data = { ${columns} };
for await (const { epoch, step, loss } of trainer.fit(data, { epochs: ${epochs}, batchSize: ${batch}, schedule: ${schedule}(${lr}) })) {
  console.log(epoch, step, loss);
}
await trainer.save("run"); // in this browser; resume with load("run")
const model = await trainer.exportModel();
`;
}

export function inPython({ task, schedule, batch, epochs }: RunSettings): string {
  const columns = names(task).map((n) => `"${n}": ${n}`).join(", ");
  return `import onnxtrain

# The same artifacts; resume a checkpoint from the page with trainer.load("checkpoint.safetensors").
trainer = onnxtrain.Trainer("art")
trainer.fit({${columns}}, epochs=${epochs}, batch_size=${batch}, schedule="${schedule}")
trainer.export("trained.onnx")
`;
}
