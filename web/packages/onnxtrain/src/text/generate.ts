/** Text from a language model, token by token. */
import { OnnxTrainError } from "../errors.js";
import { Trainer } from "../trainer.js";
import { LanguageModel } from "./language-model.js";
import { chooser, type Sampling } from "./sampling.js";
import { tokenBatch } from "./token-batch.js";

export interface GenerateOptions extends Sampling {
  /** 64 unless given. */
  readonly maxTokens?: number;
  /** Tokens that end the text; they are not given. */
  readonly stop?: number | readonly number[];
  readonly signal?: AbortSignal;
  /**
   * Whether a trainer's inference model is in memory beside the training one, and stays for the
   * next time. Unless given, it is where the weights that both have take below 32 MB. If not,
   * sessions that train are closed meanwhile, but on WebGPU, and the next step opens them again.
   */
  readonly keep?: boolean;
}

/** What `@huggingface/tokenizers` and Transformers.js call a tokenizer. */
export interface TokenizerLike {
  encode(text: string): readonly number[] | { readonly ids: readonly number[] };
  decode(ids: number[], options?: { skip_special_tokens?: boolean }): string;
}

export interface TextOptions extends GenerateOptions {
  readonly tokenizer: TokenizerLike;
}

const KEPT = 32e6;

/** Gives the tokens that follow others, one by one; leave the loop or abort the signal to stop. */
export async function* generate(
  model: Trainer | LanguageModel, prompt: ArrayLike<number | bigint>, options: GenerateOptions = {},
): AsyncGenerator<number, void, void> {
  const { maxTokens = 64, stop = [], signal } = options;
  if (!prompt.length) throw new OnnxTrainError("the prompt is empty\nhint: give at least one token");
  if (!Number.isSafeInteger(maxTokens) || maxTokens < 1) throw new OnnxTrainError(`maxTokens must be a whole number above 0: ${maxTokens}`);
  const choose = chooser(options);
  const ends = new Set([stop].flat());
  const { scores, done } = model instanceof Trainer ? withTrainer(model, options.keep) : model.sequence();
  try {
    let next = Array.from(prompt, Number);
    for (let i = 0; i < maxTokens; i++) {
      signal?.throwIfAborted();
      const token = choose(await scores(next));
      signal?.throwIfAborted();
      if (ends.has(token)) return;
      yield token;
      next = [token];
    }
  } finally {
    await done();
  }
}

/** Gives the text that follows another, piece by piece. */
export async function* generateText(
  model: Trainer | LanguageModel, prompt: string, options: TextOptions,
): AsyncGenerator<string, void, void> {
  const { tokenizer } = options;
  const encoded = tokenizer.encode(prompt);
  const ids = "ids" in encoded ? encoded.ids : encoded;
  const written: number[] = [];
  let told = "";
  for await (const token of generate(model, ids, options)) {
    written.push(token);
    const text = tokenizer.decode(written, { skip_special_tokens: true });
    // A character may need several tokens.
    if (text.endsWith("\ufffd") || !text.startsWith(told)) continue;
    if (text.length > told.length) yield text.slice(told.length);
    told = text;
  }
  const rest = tokenizer.decode(written, { skip_special_tokens: true });
  if (rest.length > told.length) yield rest.slice(told.length);
}

function withTrainer(trainer: Trainer, keep?: boolean) {
  const names = trainer.manifest.models.find((m) => m.role === "infer")?.inputs.map((t) => t.name) ?? [];
  if (!names.includes("input_ids")) throw new OnnxTrainError(`not a language model: it takes ${names.join(", ") || "nothing"}`);
  const memory = trainer.manifest.options["memory"] as { constants?: number } | undefined;
  const alone = !(keep ?? (memory?.constants ?? 0) < KEPT);
  const ids: number[] = [];
  return {
    scores: async (next: readonly number[]): Promise<ArrayLike<number>> => {
      ids.push(...next);
      const { logits } = await trainer.predict(tokenBatch([ids], names), { last: true, alone });
      if (!logits) throw new OnnxTrainError("not a language model: there is no output called logits");
      return logits.data as Float32Array;
    },
    done: async (): Promise<void> => {
      if (alone) await trainer.rest();
    },
  };
}
