"""Run a pack of single-node models in a runtime: ``python probe.py RUNTIME -o results.json``.

Requires Python 3.9 or later, numpy and the runtime. Reads pack.json from its own directory by
default. A worker process runs the nodes: if a node crashes the runtime, only that node is lost.
"""

import argparse
import base64
import datetime
import json
import pathlib
import queue
import subprocess
import sys
import threading

MARK = "\x01"  # starts the worker's own lines: runtimes print to stdout as well
MISSING, UNUSABLE = 3, 4  # exit codes
TYPES = {
    "float": "<f4",
    "double": "<f8",
    "float16": "<f2",
    "int8": "i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "?",
}
# Full float32 precision; no search for the fastest convolution.
SETTINGS = {"CUDAExecutionProvider": {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}}
SAVE_EVERY = 250  # nodes; these results survive if the run is interrupted
PACKAGES = {
    "onnxruntime": "onnxruntime (or onnxruntime-gpu)",
    "tract": "tract",
    "opencv": "opencv-python-headless",
}


class OnTheCpuError(Exception):
    """The node did not run on the requested provider."""


class OnnxRuntime:
    """onnxruntime without graph optimizations."""

    scalars = True

    def __init__(self, provider):
        import onnxruntime

        self.ort, self.provider = onnxruntime, provider or "CPUExecutionProvider"
        if self.provider not in onnxruntime.get_available_providers():
            available = ", ".join(onnxruntime.get_available_providers())
            raise ValueError(f"this onnxruntime has no {self.provider}; it has {available}")
        self.version = onnxruntime.__version__

    def run(self, path, feeds, outputs):
        """Return the outputs, in order."""
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.graph_optimization_level = self.ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        accelerated = self.provider != "CPUExecutionProvider"
        if accelerated:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        session = self.ort.InferenceSession(
            str(path), options, providers=[(self.provider, SETTINGS.get(self.provider, {}))]
        )
        if accelerated:
            if self.provider not in session.get_providers():
                raise OnTheCpuError(f"{self.provider} did not start")
            subgraphs = session.get_provider_graph_assignment_info()
            if any(subgraph.ep_name != self.provider for subgraph in subgraphs):
                raise OnTheCpuError(f"no kernel of {self.provider}: runs on the CPU")
        return session.run(outputs, feeds)


class Tract:
    """tract's Python package."""

    scalars = True

    def __init__(self, provider):
        import tract

        self.tract = tract
        self.version = tract.version()

    def run(self, path, feeds, outputs):
        """Return the outputs, in order."""
        loaded = self.tract.Onnx().load(path)
        input_names = [loaded.input_name(i) for i in range(loaded.input_count())]
        output_names = [loaded.output_name(i) for i in range(loaded.output_count())]
        runnable = loaded.into_model().into_runnable()
        arrays = [self._array(t) for t in runnable.run([feeds[n] for n in input_names])]
        by_name = dict(zip(output_names, arrays))  # noqa: B905 - Python 3.9 has no strict
        return [by_name.get(n, arrays[i]) for i, n in enumerate(outputs)]

    def _array(self, tensor):
        try:
            return tensor.to_numpy()
        except self.tract.TractError as error:
            if "TDim" not in str(error):
                raise
            # tract stores integers that may be dimensions as TDim, which numpy lacks.
            return tensor.convert_to(self.tract.DatumType.I64).to_numpy()


class OpenCv:
    """OpenCV's dnn module."""

    scalars = False  # its matrices have at least one axis

    def __init__(self, provider):
        import cv2

        self.cv2 = cv2
        cv2.setNumThreads(1)
        self.version = cv2.__version__

    def run(self, path, feeds, outputs):
        """Return the outputs, in order."""
        net = self.cv2.dnn.readNetFromONNX(str(path))
        for name, array in feeds.items():
            net.setInput(array, name)
        return list(net.forward(outputs))


RUNTIMES = {"onnxruntime": OnnxRuntime, "tract": Tract, "opencv": OpenCv}


def array_of(tensor):
    """Return a tensor of pack.json as an array."""
    import numpy as np

    data = np.frombuffer(base64.b64decode(tensor["data"]), TYPES[tensor["type"]])
    return data.reshape(tensor["dims"]).copy()


def compare(outputs, tensors, scalars=True):
    """Return whether the outputs are right or wrong, with the largest error."""
    import numpy as np

    worst = 0.0
    for y, tensor in zip(outputs, tensors):  # noqa: B905 - Python 3.9 has no strict
        expected, y = array_of(tensor), np.asarray(y)
        if not scalars and not expected.ndim and y.shape == (1,):
            y = y.reshape(())
        if y.shape != expected.shape:
            message = f"shape {list(y.shape)}, not {list(expected.shape)}"
            return {"status": "wrong", "message": message}
        if y.dtype != expected.dtype:
            return {"status": "wrong", "message": f"type {y.dtype}, not {expected.dtype}"}
        rtol = 1e-2 if tensor["type"] == "float16" else 1e-3
        a, b = y.astype(np.float64), expected.astype(np.float64)
        finite = np.isfinite(b)
        scale = max(float(np.abs(b[finite]).max(initial=0)), 1e-3)
        limit = np.where(finite, rtol * np.abs(np.where(finite, b, 0)) + rtol * 0.1 * scale, 0)
        if expected.dtype.kind != "f":
            limit = np.zeros_like(limit)
        with np.errstate(invalid="ignore"):
            same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= limit)
            error = np.abs(a - b)[np.isfinite(a) & finite]
        worst = max(worst, float(error.max(initial=0)))
        if not same.all():
            shape = "x".join(map(str, expected.shape)) or "scalar"
            message = f"{int((~same).sum())} of {same.size} numbers differ ({shape})"
            return {"status": "wrong", "error": worst, "message": message}
    return {"status": "right", "error": worst}


def first_line(error):
    """Return the first nonempty line of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def worker(folder, runtime, provider):
    """Run the nodes whose identifiers arrive on stdin; print a result for each."""

    def reply(result):
        print(f"\n{MARK}{json.dumps(result)}", flush=True)

    nodes = {n["id"]: n for n in json.loads((folder / "pack.json").read_text("utf-8"))["nodes"]}
    try:
        engine = RUNTIMES[runtime](provider)
    except ImportError as error:
        reply({"missing": first_line(error)})
        return
    except ValueError as error:
        reply({"unusable": first_line(error)})
        return
    reply({"version": engine.version})
    for line in sys.stdin:
        node = nodes[json.loads(line)]
        feeds = {t["name"]: array_of(t) for t in node["inputs"]}
        names = [t["name"] for t in node["outputs"]]
        try:
            outputs = engine.run(folder / node["file"], feeds, names)
        except Exception as error:  # any exception of the runtime means that it refuses the node
            reply({"status": "refused", "message": first_line(error)})
            continue
        reply(compare(outputs, node["outputs"], engine.scalars))


class Worker:
    """The worker process and the replies that it prints."""

    def __init__(self, arguments):
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        self.lines = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.lines.put(json.loads(line[len(MARK) :]))
        self.lines.put(None)

    def request(self, identifier, seconds):
        """Send an identifier, if any; return the reply, or how the process ended."""
        try:
            if identifier is not None:
                self.process.stdin.write(json.dumps(identifier) + "\n")
                self.process.stdin.flush()
            reply = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.process.kill()
            return {"status": "crashed", "message": f"no answer in {seconds} s"}
        except OSError:
            reply = None
        if reply is None:
            return {"status": "crashed", "message": f"exit code {self.process.wait()}"}
        return reply

    def end(self):
        """End the process."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def main():
    """Run all nodes and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runtime", choices=sorted(RUNTIMES))
    parser.add_argument("--provider", default="", help="execution provider of onnxruntime")
    parser.add_argument("-o", "--output", default="results.json")
    parser.add_argument("--pack", default=str(pathlib.Path(__file__).resolve().parent))
    parser.add_argument("--timeout", type=float, default=60, help="seconds per node")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = pathlib.Path(options.pack)
    if options.worker:
        worker(folder, options.runtime, options.provider)
        return 0
    pack = json.loads((folder / "pack.json").read_text("utf-8"))
    arguments = [options.runtime, "--pack", str(folder), "--provider", options.provider]
    results, process, version = {}, None, ""

    def save():
        summary = {
            "format": pack["format"],
            "runtime": options.runtime,
            "version": version,
            "provider": options.provider,
            "date": datetime.date.today().isoformat(),
            "onnx": pack["onnx"],
            "results": results,
        }
        pathlib.Path(options.output).write_text(json.dumps(summary, indent=1), "utf-8")

    for node in pack["nodes"]:
        if process is None:
            process = Worker(arguments)
            hello = process.request(None, 120)
            if "version" not in hello:
                process.end()
                if "missing" in hello:
                    print(f"{options.runtime} is not installed: {hello['missing']}")
                    print(f"hint: pip install {PACKAGES[options.runtime]}")
                    return MISSING
                print(hello.get("unusable") or hello.get("message"))
                return UNUSABLE
            version = hello["version"]
        result = process.request(node["id"], options.timeout)
        if result["status"] == "crashed":
            process.end()
            process = None
        about = {k: v for k, v in node.items() if k not in ("id", "file", "inputs", "outputs")}
        results[node["id"]] = {**about, **result}
        if len(results) % SAVE_EVERY == 0:
            save()
    if process is not None:
        process.end()
    save()
    states = [r["status"] for r in results.values()]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("right", "wrong", "refused", "crashed"))
    print(f"{options.runtime} {version} {options.provider}: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
