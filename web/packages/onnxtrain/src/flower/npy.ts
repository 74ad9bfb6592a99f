/** Arrays in numpy's file format, which is how they travel. */
import { count, fromBytes, kindOf, toBytes, type HostTensor } from "../dtypes.js";
import { concat } from "../sha256.js";
import { FlowerError } from "./errors.js";
import { bytesText, textBytes } from "./wire.js";

const CODES: Readonly<Record<string, string>> = {
  float32: "<f4", float64: "<f8", float16: "<f2", int64: "<i8", int32: "<i4", int16: "<i2", int8: "|i1",
  uint64: "<u8", uint32: "<u4", uint16: "<u2", uint8: "|u1", bool: "|b1",
};
const MAGIC = [0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59];

/** Gives the bytes that numpy writes for the array: equal arrays are then known by equal digests. */
export function writeNpy(tensor: HostTensor): Uint8Array {
  const code = CODES[tensor.dtype];
  if (!code) throw new FlowerError(`arrays of type ${tensor.dtype} do not travel`);
  const [first] = tensor.dims;
  const shape = tensor.dims.length === 1 ? `(${first},)` : `(${tensor.dims.join(", ")})`;
  let head = `{'descr': '${code}', 'fortran_order': False, 'shape': ${shape}, }`;
  // numpy leaves room for the first axis to grow, and fills up to whole blocks of 64.
  if (first !== undefined) head += " ".repeat(21 - String(first).length);
  head += " ".repeat(64 - ((MAGIC.length + 4 + head.length + 1) % 64)) + "\n";
  const start = [...MAGIC, 1, 0, head.length & 255, head.length >> 8];
  return concat([Uint8Array.from(start), textBytes(head), toBytes(tensor)]);
}

/** Gives the array of a file, in our order of bytes and of elements. */
export function readNpy(file: Uint8Array): HostTensor {
  if (file.length < 10 || MAGIC.some((byte, i) => file[i] !== byte)) throw unreadable("no .npy file");
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  const wide = file[6]! > 1;
  const at = wide ? 12 : 10;
  const size = wide ? view.getUint32(8, true) : view.getUint16(8, true);
  const head = bytesText(file.subarray(at, at + size));
  const code = /'descr': '([^']+)'/.exec(head)?.[1];
  const shape = /'shape': \(([^)]*)\)/.exec(head)?.[1];
  if (code === undefined || shape === undefined) throw unreadable(head);
  const dtype = Object.keys(CODES).find((name) => CODES[name]!.slice(1) === code.slice(1));
  if (!dtype) throw unreadable(`type ${code}`);
  const dims = shape.split(",").filter((d) => d.trim()).map(Number);
  const data = file.slice(at + size);
  const width = kindOf(dtype).size;
  if (data.length !== count(dims) * width) throw unreadable(`${data.length} bytes for shape [${dims.join(", ")}]`);
  if (code.startsWith(">")) for (let i = 0; i < data.length; i += width) data.subarray(i, i + width).reverse();
  const columns = /'fortran_order': True/.test(head) && dims.length > 1;
  return fromBytes(dtype, dims, columns ? byRows(data, dims, width) : data);
}

/** Gives elements that were stored column by column in the order of rows. */
function byRows(data: Uint8Array, dims: readonly number[], width: number): Uint8Array {
  const steps = dims.map((_, axis) => count(dims.slice(0, axis)));
  const found = new Uint8Array(data.length);
  const index = dims.map(() => 0);
  for (let to = 0; to < data.length; to += width) {
    const from = index.reduce((sum, i, axis) => sum + i * steps[axis]!, 0) * width;
    found.set(data.subarray(from, from + width), to);
    for (let axis = dims.length - 1; axis >= 0 && ++index[axis]! === dims[axis]; axis--) index[axis] = 0;
  }
  return found;
}

const unreadable = (what: string): FlowerError => new FlowerError(`an array cannot be read: ${what}`);
