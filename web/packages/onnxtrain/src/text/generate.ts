import { LanguageModel } from "./language-model.js";
import { tokenBatch } from "./token-batch.js";
import { OnnxTrainError } from "../errors.js";
import { uniform } from "../random.js";
import { Trainer } from "../trainer.js";

export interface Sampling {
  /** Sampling temperature; 0 is greedy decoding. Default: 0. */
  readonly temperature?: number;
  /** Nucleus sampling: sample from the smallest set of tokens whose probabilities sum to `topP`. Default: 1. */
  readonly topP?: number;
  /** Random seed for sampling, an integer. Default: 0. */
  readonly seed?: number;
}

/** Returns a function that selects the next token from logits. */
export function sampler({ temperature = 0, topP = 1, seed = 0 }: Sampling): (scores: ArrayLike<number>) => number {
  if (!(temperature >= 0) || !(topP > 0 && topP <= 1)) {
    throw new OnnxTrainError(`temperature must be >= 0 and topP in (0, 1], got ${temperature} and ${topP}`);
  }
  if (!Number.isSafeInteger(seed)) throw new OnnxTrainError(`seed must be an integer, got ${seed}`);
  const random = uniform(seed);
  return (scores) => (temperature === 0 ? argmax(scores) : sample(scores, temperature, topP, random()));
}

function argmax(scores: ArrayLike<number>): number {
  let best = 0;
  for (let i = 1; i < scores.length; i++) if (scores[i]! > scores[best]!) best = i;
  return best;
}

function sample(scores: ArrayLike<number>, temperature: number, topP: number, chance: number): number {
  const top = scores[argmax(scores)]!;
  const weights = Float64Array.from(scores, (s) => Math.exp((s - top) / temperature));
  const all = weights.reduce((a, b) => a + b, 0);
  const order = topP < 1 ? Uint32Array.from(weights.keys()).sort((a, b) => weights[b]! - weights[a]! || a - b) : undefined;
  const token = (i: number) => order?.[i] ?? i;
  let nucleus = 0;
  let count = 0;
  while (count < weights.length && (count === 0 || nucleus < topP * all)) nucleus += weights[token(count++)]!;
  let left = chance * nucleus;
  for (let i = 0; i < count; i++) {
    left -= weights[token(i)]!;
    if (left < 0) return token(i);
  }
  return token(count - 1);
}

/** Generates text with a language model. */

export interface GenerateOptions extends Sampling {
  /** Maximum number of new tokens. Default: 64. */
  readonly maxTokens?: number;
  /** Tokens that end generation; they are not yielded. */
  readonly stop?: number | readonly number[];
  readonly signal?: AbortSignal;
  /**
   * Whether the trainer's inference session is opened next to the training session and kept for the next call.
   * Default: true if the shared weights take less than 32 MB. If false, the training sessions are released during
   * generation (except on WebGPU) and the next step opens them again.
   */
  readonly keep?: boolean;
}

/** The interface of the tokenizers of `@huggingface/tokenizers` and Transformers.js. */
export interface TokenizerLike {
  encode(text: string): readonly number[] | { readonly ids: readonly number[] };
  decode(ids: number[], options?: { skip_special_tokens?: boolean }): string;
}

export interface TextOptions extends GenerateOptions {
  readonly tokenizer: TokenizerLike;
}

/** Up to this many bytes of shared weights, both sessions stay open. */
const KEEP_LIMIT = 32e6;

/** Generates tokens that continue a prompt. Break the loop or abort the signal to stop. */
export async function* generate(
  model: Trainer | LanguageModel, prompt: ArrayLike<number | bigint>, options: GenerateOptions = {},
): AsyncGenerator<number, void, void> {
  const { maxTokens = 64, stop = [], signal } = options;
  if (!prompt.length) throw new OnnxTrainError("the prompt is empty\nhint: pass at least one token");
  if (!Number.isSafeInteger(maxTokens) || maxTokens < 1) throw new OnnxTrainError(`maxTokens must be a positive integer, got ${maxTokens}`);
  const choose = sampler(options);
  const ends = new Set([stop].flat());
  const { logits, done } = model instanceof Trainer ? withTrainer(model, options.keep) : model.sequence();
  try {
    let next = Array.from(prompt, Number);
    for (let i = 0; i < maxTokens; i++) {
      signal?.throwIfAborted();
      const token = choose(await logits(next));
      signal?.throwIfAborted();
      if (ends.has(token)) return;
      yield token;
      next = [token];
    }
  } finally {
    await done();
  }
}

/** Generates text that continues a prompt, piece by piece. */
export async function* generateText(
  model: Trainer | LanguageModel, prompt: string, options: TextOptions,
): AsyncGenerator<string, void, void> {
  const { tokenizer } = options;
  const encoded = tokenizer.encode(prompt);
  const ids = "ids" in encoded ? encoded.ids : encoded;
  const written: number[] = [];
  let emitted = "";
  for await (const token of generate(model, ids, options)) {
    written.push(token);
    const text = tokenizer.decode(written, { skip_special_tokens: true });
    // A character may consist of several tokens: wait until it is complete.
    if (text.endsWith("\ufffd") || !text.startsWith(emitted)) continue;
    if (text.length > emitted.length) yield text.slice(emitted.length);
    emitted = text;
  }
  const rest = tokenizer.decode(written, { skip_special_tokens: true });
  if (rest.length > emitted.length) yield rest.slice(emitted.length);
}

function withTrainer(trainer: Trainer, keep?: boolean) {
  const names = trainer.manifest.models.find((m) => m.role === "infer")?.inputs.map((t) => t.name) ?? [];
  if (!names.includes("input_ids")) throw new OnnxTrainError(`not a language model: expected an input 'input_ids', got ${names.join(", ") || "none"}`);
  const memory = trainer.manifest.options["memory"] as { constants?: number } | undefined;
  const releaseTraining = !(keep ?? (memory?.constants ?? 0) < KEEP_LIMIT);
  const ids: number[] = [];
  return {
    logits: async (next: readonly number[]): Promise<ArrayLike<number>> => {
      ids.push(...next);
      const { logits } = await trainer.predict(tokenBatch([ids], names), { last: true, releaseTraining });
      if (!logits) throw new OnnxTrainError("not a language model: expected an output 'logits'");
      return logits.data as Float32Array;
    },
    done: async (): Promise<void> => {
      if (releaseTraining) await trainer.releasePredictor();
    },
  };
}
