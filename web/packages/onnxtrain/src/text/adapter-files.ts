/** Adapters as other tools read them. */
import { inType, toBytes, type HostTensor } from "../dtypes.js";
import { ArtifactError, OnnxTrainError } from "../errors.js";
import type { Manifest } from "../manifest.js";
import { plainSafetensors, readCheckpoint } from "../safetensors.js";
import type { Trainer } from "../trainer.js";
import { onnxAdapterBytes } from "./onnx-adapter.js";

export interface PeftOptions {
  /** What the configuration calls the torch original. */
  readonly baseModel?: string;
  /** PEFT's word for the task; `CAUSAL_LM` unless given. */
  readonly taskType?: string | null;
}

/** The two files of a directory of PEFT. */
export interface PeftFiles {
  readonly "adapter_config.json": Uint8Array;
  readonly "adapter_model.safetensors": Uint8Array;
}

/** What the manifest says of the adapters. */
interface Table {
  readonly config: Readonly<Record<string, unknown>>;
  readonly tensors: readonly {
    readonly module: string;
    readonly kind: string;
    readonly a: string;
    readonly b: string;
    readonly magnitude: string | null;
    readonly scaling: number;
  }[];
}

const PREFIX = "base_model.model.";

/** Gives the adapters as the files that PEFT loads onto the torch original. */
export async function exportPeft(trainer: Trainer, options: PeftOptions = {}): Promise<PeftFiles> {
  const { config, tensors } = tableOf(trainer.manifest);
  const values = await valuesOf(trainer);
  const found = new Map<string, HostTensor>();
  for (const { module, kind, a, b, magnitude } of tensors) {
    const [first, second] = kind === "conv" ? [values(a), values(b)] : [transposed(values(a)), transposed(values(b))];
    const names = kind === "embedding" ? ["lora_embedding_A", "lora_embedding_B"] : ["lora_A.weight", "lora_B.weight"];
    found.set(`${PREFIX}${module}.${names[0]}`, first);
    found.set(`${PREFIX}${module}.${names[1]}`, second);
    if (magnitude === null) continue;
    const t = values(magnitude);
    const dims = kind === "conv" ? [1, t.data.length, ...first.dims.slice(2).map(() => 1)] : t.dims;
    found.set(`${PREFIX}${module}.lora_magnitude_vector`, { ...t, dims });
  }
  const { baseModel = "", taskType = "CAUSAL_LM" } = options;
  const settings = Object.entries({ ...config, base_model_name_or_path: baseModel, task_type: taskType });
  const text = `${JSON.stringify(Object.fromEntries(settings.sort(([x], [y]) => (x < y ? -1 : 1))), null, 2)}\n`;
  return {
    "adapter_config.json": new TextEncoder().encode(text),
    "adapter_model.safetensors": plainSafetensors(found, { format: "pt" }),
  };
}

/** Gives the adapters as the `.onnx_adapter` file that ONNX Runtime and onnxruntime-genai load. */
export async function exportOnnxAdapter(trainer: Trainer): Promise<Uint8Array> {
  const { tensors } = tableOf(trainer.manifest);
  const odd = tensors.find((t) => t.magnitude !== null || t.kind === "conv");
  if (odd) {
    throw new OnnxTrainError(
      `'${odd.module}': ${odd.magnitude === null ? "convolutions" : "magnitudes of DoRA"} have no place in an .onnx_adapter\n` +
        "hint: export them for PEFT, or merge them in Python",
    );
  }
  const values = await valuesOf(trainer);
  const stored = new Map(trainer.parameters.map((w) => [w.name, w.locations[0]?.dtype ?? w.dtype]));
  const found = new Map<string, HostTensor>();
  for (const { a, b, scaling } of tensors) {
    // The base knows no scaling, so that it serves adapters of any rank and alpha.
    const factor = Math.fround(scaling);
    const second = values(b);
    found.set(a, values(a));
    found.set(b, { ...second, data: (second.data as Float32Array).map((v) => v * factor) });
  }
  return onnxAdapterBytes([...found].map(([name, t]) => {
    const own = inType(t, stored.get(name));
    return { name, dtype: own.dtype, dims: own.dims, bytes: toBytes(own) };
  }));
}

function tableOf(manifest: Manifest): Table {
  const table = manifest.options["adapters"] as Table | undefined;
  if (!table) throw new ArtifactError("these artifacts have no adapters\nhint: build them from onnxtrain.lora(model)");
  return table;
}

/** Gives values by name, all of the same moment. */
async function valuesOf(trainer: Trainer): Promise<(name: string) => HostTensor> {
  const { tensors } = await readCheckpoint(await trainer.exportCheckpoint());
  return (name) => inType(tensors.get(name)!, "float32");
}

function transposed({ dtype, dims, data }: HostTensor): HostTensor {
  const [rows, columns] = dims as [number, number];
  const own = new Float32Array(data.length);
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) own[j * rows + i] = data[i * columns + j] as number;
  return { dtype, dims: [columns, rows], data: own };
}
