import { cosine, Trainer } from "onnxtrain";
import { useEffect, useRef, useState } from "react";
import { createRoot } from "react-dom/client";

/** Random points in the plane, and whether they are inside a circle. */
function points(n) {
  const point = Float32Array.from({ length: 2 * n }, () => 4 * Math.random() - 2);
  const labels = Uint8Array.from({ length: n }, (_, i) => Number(Math.hypot(point[2 * i], point[2 * i + 1]) < 1.2));
  return { point, labels };
}

/** Trains while it is mounted; unmounting it or pressing Stop ends the run. */
function Training({ artifacts, epochs = 10 }) {
  const [progress, setProgress] = useState();
  const [running, setRunning] = useState(false);
  const [error, setError] = useState();
  const run = useRef();

  useEffect(() => () => run.current?.abort(), []);

  async function train() {
    const { signal } = (run.current = new AbortController());
    setError(undefined);
    setRunning(true);
    let trainer;
    try {
      trainer = await Trainer.create({ artifacts, device: "wasm", signal });
      const options = { epochs, batchSize: 32, schedule: cosine(0.02), validation: points(500), signal };
      for await (const m of trainer.fit(points(2000), options)) if (m.validation) setProgress(m);
    } catch (reason) {
      if (!signal.aborted) setError(reason.message);
    } finally {
      await trainer?.dispose();
      setRunning(false);
    }
  }

  return (
    <main>
      <button onClick={train} disabled={running}>Train</button>
      <button onClick={() => run.current.abort()} disabled={!running}>Stop</button>
      <progress max={epochs} value={progress?.epoch ?? 0} />
      {progress && <p role="status">{running ? "Epoch" : "Done:"} {progress.epoch} of {epochs}, {(100 * progress.validation.accuracy).toFixed(1)} % accuracy</p>}
      {error && <p role="alert">{error}</p>}
    </main>
  );
}

createRoot(document.getElementById("root")).render(<Training artifacts={new URL("./art/", location.href)} />);
