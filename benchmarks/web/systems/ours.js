/** onnxtrain on stock onnxruntime-web. */
import { Trainer } from "onnxtrain";

export async function prepare(task, { optimizer, device, together, artifacts, runtimeUrl }) {
  const trainer = await Trainer.create({ artifacts: `${task.base}${artifacts ?? optimizer}/`, device, worker: false, threads: 1, runtimeUrl });
  if (trainer.device !== device) throw new Error(`runs on ${trainer.device}`);
  let next = 0;
  return {
    losses: optimizer,
    async train(steps) {
      const list = Array.from({ length: steps }, () => {
        const [i, j] = task.at(next++);
        return { x: { data: task.batches[i].x, dims: task.dims }, labels: task.batches[j].labels };
      });
      const losses = [];
      for await (const m of trainer.fit(list, { stepsPerCall: together })) losses.push(m.loss);
      return losses;
    },
  };
}
