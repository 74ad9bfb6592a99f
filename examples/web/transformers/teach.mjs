/** Trains a classifier on embeddings of Transformers.js, in a page or in Node; `model` is any encoder that it can load. */
import { pipeline } from "@huggingface/transformers";
import { createHead, Trainer } from "onnxtrain";

/** Returns a function that classifies a text, trained on `texts` and their `labels`. */
export async function teach(model, texts, labels, options = {}) {
  const embed = await pipeline("feature-extraction", model, { dtype: "fp32" });
  const encode = async (inputs) => (await embed(inputs, { pooling: "mean", normalize: true })).tolist();
  const x = await encode(texts);
  const artifacts = await createHead({ inputs: x[0].length, classes: Math.max(...labels) + 1, optimizer: { lr: 0.05 } });
  const trainer = await Trainer.create({ artifacts, ...options });
  for await (const { loss } of trainer.fit({ x, labels }, { epochs: 40, batchSize: 4 })) options.onLoss?.(loss);
  return async (text) => {
    const { data } = (await trainer.predict({ x: await encode([text]) })).logits;
    return data.indexOf(Math.max(...data));
  };
}
