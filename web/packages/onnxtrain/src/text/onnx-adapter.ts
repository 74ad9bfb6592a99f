/** Files of adapters, as ONNX Runtime writes and reads them: flatbuffers with one kind of table in another. */
import { OnnxTrainError } from "../errors.js";

export interface AdapterTensor {
  readonly name: string;
  readonly dtype: string;
  readonly dims: readonly number[];
  readonly bytes: Uint8Array;
}

/** Numbers of element types in ONNX. */
const ELEMENT: Readonly<Record<string, number>> = { float32: 1, float16: 10, float64: 11, bfloat16: 16 };
/** Of the format, of the adapter and of the model: nobody else counts them. */
const VERSION = 1;
/** Four fields of four bytes, behind the place of the vtable: so it is for both tables. */
const VTABLE = [12, 20, 4, 8, 12, 16];
const TABLE = 20;

const text = new TextEncoder();
const aligned = (at: number, to: number): number => Math.ceil(at / to) * to;
/** Where a vector begins whose elements, behind its length, lie on whole words of eight bytes. */
const vectorAt = (at: number): number => aligned(at + 4, 8) - 4;

/** Gives the bytes of an `.onnx_adapter` file. */
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
  /** Writes how far it is from here to what lies behind. */
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
    if (element === undefined) throw new OnnxTrainError(`'${t.name}' is ${t.dtype}, which no adapter is`);
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
