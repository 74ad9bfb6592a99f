/** Converts columns from JSON lists to typed arrays; integer vectors are labels (int64). */
export function columns(listed) {
  const typed = ({ data, dims }) => {
    const whole = dims.length === 1 && data.every(Number.isInteger);
    return { dims, data: whole ? BigInt64Array.from(data, BigInt) : Float32Array.from(data), dtype: whole ? "int64" : "float32" };
  };
  return Object.fromEntries(Object.entries(listed).map(([name, column]) => [name, typed(column)]));
}
