/** Inference with a language model file, without a trainer. */
import { tokenBatch } from "./token-batch.js";
import { Artifacts } from "../artifacts.js";
import { decode, filled, type HostTensor } from "../dtypes.js";
import { wrapRuntimeError, OnnxTrainError } from "../errors.js";
import { feed } from "../feeds.js";
import { inNode, type OrtSession, Runtime, type RuntimeOptions } from "../runtime.js";
import type { FileData } from "../weights-file.js";

export interface LanguageModelOptions extends RuntimeOptions {
  /** The bytes of the model file, or its URL or path. */
  readonly model: Uint8Array | string | URL;
  /** External data files of the model, by the names in the model. */
  readonly weights?: Readonly<Record<string, FileData>>;
}

/** Inputs of the KV cache; the output `present...` becomes the input of the next call. */
const PAST = /^past[._]?(key_values)?/;

/** A language model that runs in this thread, with a KV cache if the file has one. */
export class LanguageModel {
  private constructor(
    readonly runtime: Runtime,
    readonly session: OrtSession,
  ) {}

  static async open(options: LanguageModelOptions): Promise<LanguageModel> {
    const { device = "auto" } = options;
    const runtime = await Runtime.open(device === "auto" ? (inNode() ? "node" : "wasm") : device, options);
    const external = Object.entries(options.weights ?? {}).map(([path, data]) => ({ path, data }));
    const model = options.model instanceof Uint8Array ? options.model : await bytesAt(String(options.model));
    try {
      return new LanguageModel(runtime, await runtime.session(model, external));
    } catch (error) {
      throw wrapRuntimeError(error, `model on ${runtime.device}`);
    }
  }

  /** Starts a sequence: `logits` appends tokens and returns the logits of the next token. */
  sequence(): { logits(next: readonly number[]): Promise<ArrayLike<number>>; done(): Promise<void> } {
    const names = [...this.session.inputNames];
    const past = names.filter((n) => PAST.test(n));
    let cache = new Map(past.map((name) => [name, this.#empty(name)]));
    const ids: number[] = [];
    const nextLogits = async (next: readonly number[]): Promise<ArrayLike<number>> => {
      const before = past.length ? ids.length : 0;
      ids.push(...next);
      const batch = tokenBatch([past.length ? next : ids], names.filter((n) => !past.includes(n)));
      const specs = this.#specs(Object.keys(batch));
      const feeds = feed(specs, batch);
      if (feeds.has("attention_mask")) feeds.set("attention_mask", { dtype: "int64", dims: [1, ids.length], data: new BigInt64Array(ids.length).fill(1n) });
      for (const name of ["position_ids", "cache_position"]) {
        if (feeds.has(name)) feeds.set(name, shifted(feeds.get(name)!, before));
      }
      const results = await this.#run(new Map([...feeds, ...cache]));
      cache = new Map(past.map((name) => [name, results.get(name.replace(PAST, "present"))!]));
      const logits = results.get("logits");
      if (!logits) throw new OnnxTrainError("not a language model: expected an output 'logits'");
      const width = logits.dims.at(-1)!;
      const last = logits.data.subarray(logits.data.length - width);
      return logits.dtype === "float32" ? (last as Float32Array) : Float32Array.from(last as Uint16Array, (v) => decode(logits.dtype, v));
    };
    return { logits: nextLogits, done: async () => undefined };
  }

  async #run(feeds: ReadonlyMap<string, HostTensor>): Promise<Map<string, HostTensor>> {
    const given = Object.fromEntries([...feeds].map(([n, t]) => [n, this.runtime.tensor(t, n)]));
    try {
      const results = await this.runtime.run(this.session, given);
      const outputs = new Map<string, HostTensor>();
      for (const [name, t] of Object.entries(results)) outputs.set(name, await this.runtime.host(t as Parameters<Runtime["host"]>[0]));
      return outputs;
    } catch (error) {
      throw wrapRuntimeError(error, `model on ${this.runtime.device}`);
    }
  }

  #specs(names: readonly string[]) {
    return names.map((name) => ({ name, dtype: "int64", shape: name === "cache_position" ? ["n"] : ["b", "n"], role: "input" as const, feeds: null }));
  }

  /** Returns an empty cache: [1, heads, 0, size]. */
  #empty(name: string): HostTensor {
    const metadata = this.session.inputMetadata?.find((m) => m.name === name);
    const shape = metadata?.isTensor ? metadata.shape : [];
    const dims = shape.map((d, i) => (i === 0 ? 1 : typeof d === "number" && d >= 0 ? d : i === 2 ? 0 : -1));
    if (!metadata?.isTensor || dims.length < 3 || dims.includes(-1)) {
      throw new OnnxTrainError(`unsupported shape of the KV cache '${name}': [${shape.join(", ")}]\nhint: export the model without a cache`);
    }
    dims[2] = 0;
    return filled(metadata.type, dims, 0);
  }

  async release(): Promise<void> {
    await this.session.release();
  }
}

const shifted = (t: HostTensor, by: number): HostTensor => ({ ...t, data: (t.data as BigInt64Array).map((v) => v + BigInt(by)) });

async function bytesAt(place: string): Promise<Uint8Array> {
  const at = Math.max(place.lastIndexOf("/"), inNode() ? place.lastIndexOf("\\") : -1);
  return await Artifacts.raw(at < 0 ? "." : place.slice(0, at + 1), decodeURIComponent(place.slice(at + 1)));
}
