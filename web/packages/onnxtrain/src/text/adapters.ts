import { plainSafetensors, readCheckpoint } from "../checkpoint.js";
import { type HostTensor, castFloat, toBytes } from "../dtypes.js";
import { ArtifactError, OnnxTrainError } from "../errors.js";
import type { Manifest } from "../manifest.js";
import type { Trainer } from "../trainer.js";

/** Exports adapters for other tools: PEFT and ONNX Runtime. */

export interface PeftOptions {
  /** `base_model_name_or_path` of the configuration. */
  readonly baseModel?: string;
  /** PEFT's `task_type`. Default: `CAUSAL_LM`. */
  readonly taskType?: string | null;
}

/** The two files of a PEFT adapter directory. */
export interface PeftFiles {
  readonly "adapter_config.json": Uint8Array;
  readonly "adapter_model.safetensors": Uint8Array;
}

/** The adapters in the manifest. */
interface AdapterTable {
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

/** Exports the adapters as the files that PEFT loads with the original torch model. */
export async function exportPeft(trainer: Trainer, options: PeftOptions = {}): Promise<PeftFiles> {
  const { config, tensors } = tableOf(trainer.manifest);
  const values = await valuesOf(trainer);
  const exported = new Map<string, HostTensor>();
  for (const { module, kind, a, b, magnitude } of tensors) {
    const [first, second] = kind === "conv" ? [values(a), values(b)] : [transposed(values(a)), transposed(values(b))];
    const names = kind === "embedding" ? ["lora_embedding_A", "lora_embedding_B"] : ["lora_A.weight", "lora_B.weight"];
    exported.set(`${PREFIX}${module}.${names[0]}`, first);
    exported.set(`${PREFIX}${module}.${names[1]}`, second);
    if (magnitude === null) continue;
    const t = values(magnitude);
    const dims = kind === "conv" ? [1, t.data.length, ...first.dims.slice(2).map(() => 1)] : t.dims;
    exported.set(`${PREFIX}${module}.lora_magnitude_vector`, { ...t, dims });
  }
  const { baseModel = "", taskType = "CAUSAL_LM" } = options;
  const settings = Object.entries({ ...config, base_model_name_or_path: baseModel, task_type: taskType });
  const text = `${JSON.stringify(Object.fromEntries(settings.sort(([x], [y]) => (x < y ? -1 : 1))), null, 2)}\n`;
  return {
    "adapter_config.json": new TextEncoder().encode(text),
    "adapter_model.safetensors": plainSafetensors(exported, { format: "pt" }),
  };
}

/** Exports the adapters as the `.onnx_adapter` file that ONNX Runtime and onnxruntime-genai load. */
export async function exportOnnxAdapter(trainer: Trainer): Promise<Uint8Array> {
  const { tensors } = tableOf(trainer.manifest);
  const odd = tensors.find((t) => t.magnitude !== null || t.kind === "conv");
  if (odd) {
    throw new OnnxTrainError(
      `'${odd.module}': an .onnx_adapter file cannot hold ${odd.magnitude === null ? "adapters of convolutions" : "DoRA magnitudes"}\n` +
        "hint: use exportPeft(trainer), or merge the adapters in Python",
    );
  }
  const values = await valuesOf(trainer);
  const stored = new Map(trainer.parameters.map((w) => [w.name, w.locations[0]?.dtype ?? w.dtype]));
  const exported = new Map<string, HostTensor>();
  for (const { a, b, scaling } of tensors) {
    // The base model does not apply the scaling, so that it accepts adapters of any rank and alpha.
    const factor = Math.fround(scaling);
    const second = values(b);
    exported.set(a, values(a));
    exported.set(b, { ...second, data: (second.data as Float32Array).map((v) => v * factor) });
  }
  return onnxAdapterBytes([...exported].map(([name, t]) => {
    const own = castFloat(t, stored.get(name));
    return { name, dtype: own.dtype, dims: own.dims, bytes: toBytes(own) };
  }));
}

function tableOf(manifest: Manifest): AdapterTable {
  const table = manifest.options["adapters"] as AdapterTable | undefined;
  if (!table) throw new ArtifactError("these artifacts have no adapters\nhint: build them from onnxtrain.lora(model) in Python");
  return table;
}

/** Returns a getter for the parameters, which all come from one checkpoint. */
async function valuesOf(trainer: Trainer): Promise<(name: string) => HostTensor> {
  const { tensors } = await readCheckpoint(await trainer.exportCheckpoint());
  return (name) => castFloat(tensors.get(name)!, "float32");
}

function transposed({ dtype, dims, data }: HostTensor): HostTensor {
  const [rows, columns] = dims as [number, number];
  const own = new Float32Array(data.length);
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) own[j * rows + i] = data[i * columns + j] as number;
  return { dtype, dims: [columns, rows], data: own };
}

// The .onnx_adapter format of ONNX Runtime: a flatbuffer with a table of parameter tables.

export interface AdapterTensor {
  readonly name: string;
  readonly dtype: string;
  readonly dims: readonly number[];
  readonly bytes: Uint8Array;
}

/** TensorProto.DataType by numpy name. */
const ELEMENT: Readonly<Record<string, number>> = { float32: 1, float16: 10, float64: 11, bfloat16: 16 };
/** Versions of format, adapter and model. */
const VERSION = 1;
/** Vtable of both tables: four fields of four bytes after the vtable offset. */
const VTABLE = [12, 20, 4, 8, 12, 16];
const TABLE = 20;

const text = new TextEncoder();
const aligned = (at: number, to: number): number => Math.ceil(at / to) * to;
/** Returns the offset of a vector whose elements, after the 4-byte length, are aligned to 8 bytes. */
const vectorAt = (at: number): number => aligned(at + 4, 8) - 4;

/** Serializes an `.onnx_adapter` file. */
export function onnxAdapterBytes(tensors: readonly AdapterTensor[]): Uint8Array {
  const vtable = 8;
  const root = vtable + 2 * VTABLE.length;
  const list = root + TABLE;
  const tables = list + 4 + 4 * tensors.length;
  let end = tables + TABLE * tensors.length;
  const places = tensors.map((t) => {
    const name = aligned(end, 4);
    const dims = vectorAt(name + 4 + text.encode(t.name).length + 1);
    const data = vectorAt(dims + 4 + 8 * t.dims.length);
    end = data + 4 + t.bytes.length;
    return { name, dims, data };
  });
  const out = new Uint8Array(aligned(end, 8));
  const view = new DataView(out.buffer);
  const put = (at: number, value: number) => view.setUint32(at, value, true);
  /** Writes the relative offset from `at` to `to`. */
  const point = (at: number, to: number) => put(at, to - at);
  put(0, root);
  out.set(text.encode("TORT"), 4);
  VTABLE.forEach((v, i) => view.setUint16(vtable + 2 * i, v, true));
  put(root, root - vtable);
  for (const at of [4, 8, 12]) put(root + at, VERSION);
  point(root + 16, list);
  put(list, tensors.length);
  tensors.forEach((t, i) => {
    const element = ELEMENT[t.dtype];
    if (element === undefined) throw new OnnxTrainError(`'${t.name}' is ${t.dtype}, which an .onnx_adapter file does not support`);
    const table = tables + TABLE * i;
    const { name, dims, data } = places[i]!;
    point(list + 4 + 4 * i, table);
    put(table, table - vtable);
    point(table + 4, name);
    point(table + 8, dims);
    put(table + 12, element);
    point(table + 16, data);
    const letters = text.encode(t.name);
    put(name, letters.length);
    out.set(letters, name + 4);
    put(dims, t.dims.length);
    t.dims.forEach((d, j) => view.setBigInt64(dims + 4 + 8 * j, BigInt(d), true));
    put(data, t.bytes.length);
    out.set(t.bytes, data + 4);
  });
  return out;
}
