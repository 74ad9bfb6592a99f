"""What every pass, preference and threshold is worth in whole training steps.

    python -m benchmarks.passes                                   # all of them, target cpu
    python -m benchmarks.passes --nets gpt2,vit --passes fuse_swish_grad,means-as-matmul
    python -m benchmarks.passes --target cuda --json cuda.json    # on a machine with a GPU
    python -m benchmarks.passes --export                          # only export the nets
    python -m benchmarks.passes --sizes UNROLLED_TAPS             # where a threshold crosses 1
    python -m benchmarks.passes --processes 8                     # nets side by side, a core each
    python -m benchmarks.passes --write                           # stored rows into docs/speed.md

Each net is built with everything on, and again without each pass, preference or threshold. The
steps of all builds that differ run in turns, a few builds at a time, and the ratio of times is the
median over the rounds: below 1 the pass pays. Two trainers of the same build differ by a few
percent, because their memory lies elsewhere. So trainers are new for every repetition, and a pass
has an effect where all repetitions lie on the same side of 1 by more than `NOISE`. The first row of
a net compares a build with itself.

Times are processor time of one thread on the CPU and wall-clock time on a GPU. Rows that the JSON
file has already are not measured again, so that a run may be split (`--nets`, `--passes`) or
continued. With `--processes`, nets are measured side by side: on the CPU each on a core of its own,
on a GPU one at a time while others are built and loaded. `--models` names the folder of exported
nets; exporting needs torch, and so does measuring on a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import gc
import hashlib
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnxtrain
from benchmarks import machine, page, quiet, report, thresholds
from benchmarks.pass_nets import NETS, AdapterNet, Net
from benchmarks.peers import ROOT
from benchmarks.threshold_nets import CUDA_SIDES
from onnxtrain import targets
from onnxtrain import thresholds as T
from onnxtrain.errors import OnnxTrainError
from onnxtrain.optimize import pipeline

PAGE = ROOT / "docs" / "speed.md"
REPEATS = {"cpu": 5, "cuda": 2}
ROUNDS, SLICE = 4, 0.1
"""Rounds of a repetition, and seconds that each side runs in a round."""
GROUP = 6
"""Builds that are in memory at once, beside the one with everything on."""
NOISE = 0.005
"""A repetition whose ratio is this close to 1 shows no effect."""
ITSELF = "(itself)"
AnyNet = Net | AdapterNet
_LISTS = ("AFTER_LAST_GRADIENT", "INPUTS", "FUSIONS", "BEFORE", "AFTER", "FINAL")
_ALL_OFF = {"from": 1 << 60, "up to": 0, "below": 0}


@dataclasses.dataclass(frozen=True)
class Switch:
    """Something that a build can do without.

    Attributes:
        kind: "pass", "preference", "threshold", or "itself" for a build like the first one.
        name: the function of a pass, or the name of a preference or a threshold.
    """

    kind: str
    name: str


def switches(target: str) -> list[Switch]:
    """Return all passes, preferences and thresholds that apply to a target."""
    target_ = targets.find(target)
    entries = [p for name in _LISTS for p in getattr(pipeline, name)]
    passes = dict.fromkeys(p.rewrite.__name__ for p in entries if p.runs_on(target_))
    owned = {p.prefers for p in entries}
    preferences = sorted(target_.preferences - owned)
    sizes = list(thresholds.CASES) if target == "cpu" else list(CUDA_SIDES)
    return [
        *(Switch("pass", n) for n in passes),
        *(Switch("preference", n) for n in preferences),
        *(Switch("threshold", n) for n in sizes),
    ]


@contextlib.contextmanager
def without(switch: Switch, target: str) -> Iterator[None]:
    """Build without a pass, a preference or a threshold's variant."""
    with contextlib.ExitStack() as undo:
        if switch.kind == "pass":
            for name in _LISTS:
                entries = getattr(pipeline, name)
                undo.callback(setattr, pipeline, name, entries)
                rest = tuple(p for p in entries if p.rewrite.__name__ != switch.name)
                setattr(pipeline, name, rest)
        elif switch.kind == "preference":
            undo.callback(targets.TARGETS.__setitem__, target, targets.TARGETS[target])
            targets.TARGETS[target] = targets.TARGETS[target].without(switch.name)
        elif switch.kind == "threshold":
            undo.enter_context(thresholds.forced(switch.name, _ALL_OFF[_side(switch.name)]))
        yield


def _side(name: str) -> str:
    return thresholds.CASES[name].side if name in thresholds.CASES else CUDA_SIDES[name]


@contextlib.contextmanager
def recording() -> Iterator[set[Switch]]:
    """Collect what builds in this context use: passes that change something, and what is read."""
    used: set[Switch] = set()
    with contextlib.ExitStack() as undo:
        for name in _LISTS:
            entries = getattr(pipeline, name)
            undo.callback(setattr, pipeline, name, entries)
            setattr(pipeline, name, tuple(_recorded(p, used) for p in entries))
        prefers = targets.Target.prefers

        def noted(self: targets.Target, form: str) -> bool:
            used.add(Switch("preference", form))
            return prefers(self, form)

        undo.callback(setattr, targets.Target, "prefers", prefers)
        setattr(targets.Target, "prefers", noted)  # noqa: B010 (a method is replaced for a while)

        class Noted(type(T)):
            """A module that notes which of its constants are read."""

            def __getattribute__(self, name: str) -> Any:
                if name.isupper():
                    used.add(Switch("threshold", name))
                return super().__getattribute__(name)

        undo.callback(setattr, T, "__class__", type(T))
        T.__class__ = Noted
        yield used


def _recorded(entry: pipeline.Pass, used: set[Switch]) -> pipeline.Pass:
    plain = entry.rewrite

    def rewrite(*args: Any) -> int:
        count = plain(*args)
        if count:
            used.add(Switch("pass", plain.__name__))
        return count

    return dataclasses.replace(entry, rewrite=rewrite)


@dataclasses.dataclass(frozen=True)
class Build:
    """A saved build: where it is, what identifies its models, and what it used."""

    folder: str
    digest: str
    used: frozenset[Switch] = frozenset()


def build(name: str, path: Path, target: str, switch: Switch | None, folder: str) -> Build:
    """Build a net, without what a switch turns off, and save it."""
    warnings.simplefilter("ignore")
    net = NETS[target][name]  # by name, because nets cannot be sent to another process
    with contextlib.ExitStack() as stack:
        used = stack.enter_context(recording()) if switch is None else set[Switch]()
        if switch is not None:
            stack.enter_context(without(switch, target))
        artifacts = net.build(path, target)
    digest = hashlib.sha256()
    for name, model in sorted(artifacts.models.items()):
        digest.update(name.encode() + model.SerializeToString(deterministic=True))
    out = Path(folder) / (switch.name if switch else "all")
    artifacts.save(out)
    return Build(str(out), digest.hexdigest(), frozenset(used))


class Runner:
    """A trainer of a build, and the memory that it takes on a device."""

    def __init__(self, net: AnyNet, folder: str, target: str, *, weigh: bool) -> None:
        self._batch, self._gpu, self._weigh = net.batch(), target == "cuda", weigh
        before = self._used()
        device = "cuda" if self._gpu else "cpu"
        self._trainer = onnxtrain.Trainer(folder, device=device, threads=1)
        self._trainer.lr = 1e-6
        self.megabytes = self._used() - before

    def _used(self) -> float:
        return _device_megabytes() if self._gpu and self._weigh else 0.0

    def warm_up(self) -> None:
        """Train until steps are replayed on a device: warm-up, capture and its check, a replay."""
        before = self._used()
        for _ in range(4):
            self.step()
        self.megabytes += self._used() - before

    def step(self) -> None:
        """Train a step; reading the loss waits for the device."""
        float(self._trainer.step(**self._batch).loss)

    def seconds(self, steps: int) -> float:
        """Return the time of a step."""
        clock = time.perf_counter if self._gpu else time.process_time
        start = clock()
        for _ in range(steps):
            self.step()
        return max((clock() - start) / steps, 1e-9)


def _device_megabytes() -> float:
    """Return the memory that this process takes on its device, as `nvidia-smi` counts it."""
    gc.collect()
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    used = dict(line.split(",") for line in lines)
    return float(used.get(str(os.getpid()), 0))


@dataclasses.dataclass
class Times:
    """What a build took beside the build with everything on, over all repetitions."""

    folder: str
    ratios: list[float] = dataclasses.field(default_factory=list)
    own: list[float] = dataclasses.field(default_factory=list)
    base: list[float] = dataclasses.field(default_factory=list)
    megabytes: tuple[float, float] = (0.0, 0.0)
    failure: str = ""

    def row(self, target: str) -> dict[str, Any]:
        """Return the columns of a result."""
        if self.failure:  # operators that the runtime lacks
            return {"changes": True, "fails": self.failure}
        row: dict[str, Any] = {
            "with_ms": round(1e3 * statistics.median(self.base), 3),
            "without_ms": round(1e3 * statistics.median(self.own), 3),
            "ratio": round(statistics.median(self.ratios), 4),
            "low": round(min(self.ratios), 4),
            "high": round(max(self.ratios), 4),
        }
        if target == "cuda":
            row |= dict(zip(("with_mb", "without_mb"), map(round, self.megabytes), strict=True))
        return row


def compare(
    net: AnyNet, base: str, others: Sequence[str], target: str, repeats: int
) -> list[Times]:
    """Time the steps of a build, and of others without something, in turns."""
    found = []
    for start in range(0, len(others), GROUP):
        group = [Times(folder) for folder in others[start : start + GROUP]]
        for repeat in range(repeats):
            _repeat(net, Times(base), group, target, repeat)
        found += group
    return found


def _repeat(net: AnyNet, base: Times, group: list[Times], target: str, repeat: int) -> None:
    order = [base, *group] if repeat % 2 else [*group, base]
    runners: dict[int, Runner] = {}
    for side in [s for s in order if not s.failure]:
        with _failures(side):
            runners[id(side)] = Runner(net, side.folder, target, weigh=repeat == 0)
    with turn(target):
        for side in [s for s in order if not s.failure]:
            with _failures(side):
                runners[id(side)].warm_up()
        if base.failure:
            raise OnnxTrainError(base.failure)
        order = [side for side in order if not side.failure]
        steps = {id(s): max(int(SLICE / runners[id(s)].seconds(2)), 1) for s in order}
        rounds = []
        for i in range(ROUNDS):
            sides = order if i % 2 else order[::-1]
            rounds.append({id(s): runners[id(s)].seconds(steps[id(s)]) for s in sides})
        for side in order:
            side.base += [r[id(base)] for r in rounds]
            side.own += [r[id(side)] for r in rounds]
            side.ratios.append(statistics.median(r[id(base)] / r[id(side)] for r in rounds))
            if repeat == 0:
                side.megabytes = (runners[id(base)].megabytes, runners[id(side)].megabytes)
        runners.clear()
        gc.collect()


@contextlib.contextmanager
def _failures(side: Times) -> Iterator[None]:
    """Note that a build does not run."""
    try:
        yield
    except OnnxTrainError as error:
        side.failure = str(error).splitlines()[0][:200]


def effect(row: dict[str, Any]) -> int:
    """Return -1 where a pass makes a step faster, 1 where slower, 0 within noise."""
    if row["high"] < 1 - NOISE:
        return -1
    return 1 if row["low"] > 1 + NOISE else 0


def measure(
    net: AnyNet,
    target: str,
    wanted: Sequence[Switch],
    options: argparse.Namespace,
    keep: Callable[[dict[str, Any]], None],
    known: set[tuple[str, str]],
) -> None:
    """Measure what is not known yet of a net, and pass each row to `keep`."""
    path = net.export(options.models)
    with tempfile.TemporaryDirectory() as folder, _pool(options.jobs) as run:
        base = run(build, net.name, path, target, None, folder).result()
        chosen = [s for s in wanted if s in base.used and (net.name, s.name) not in known]
        for s in wanted:
            if s.kind == "pass" and s not in base.used:
                keep({"net": net.name, "kind": s.kind, "name": s.name, "changes": False})
        if not chosen:
            return
        again = Switch("itself", ITSELF)
        queue = [again] if (net.name, ITSELF) not in known else []
        queue += chosen
        rows = {s: {"net": net.name, "kind": s.kind, "name": s.name} for s in queue}
        folders: dict[Switch, str] = {}
        builds = [(s, run(build, net.name, path, target, s, folder)) for s in queue]
        for s, built in builds:
            other = built.result()
            rows[s]["changes"] = other.digest != base.digest
            if rows[s]["changes"] or s == again:
                folders[s] = other.folder
        times = compare(net, base.folder, list(folders.values()), target, options.repeats)
        for s, measured in zip(folders, times, strict=True):
            rows[s] |= measured.row(target)
        for row in rows.values():
            keep(row)


@contextlib.contextmanager
def turn(target: str) -> Iterator[None]:
    """Measure on a GPU while no other process of this command does."""
    if target == "cpu":
        yield
        return
    with (Path(tempfile.gettempdir()) / "onnxtrain-passes.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def side_by_side(nets: Sequence[AnyNet], options: argparse.Namespace, out: Path) -> None:
    """Measure each net in a process of its own, `--processes` at a time; join their results."""
    cores: queue.Queue[int] = queue.Queue()
    for core in sorted(os.sched_getaffinity(0))[-options.processes :]:
        cores.put(core)
    given = {"passes": options.passes, "repeats": options.repeats, "models": options.models}
    flags = [f"--{k}={v}" for k, v in given.items() if v is not None]
    flags += [f"--target={options.target}", f"--jobs={options.jobs}"]

    def run(net: AnyNet) -> None:
        core = cores.get()
        part = out.with_suffix(f".{net.name}.json")
        command = [sys.executable, "-m", "benchmarks.passes", f"--nets={net.name}", *flags]
        pin = ["taskset", "-c", str(core)] if options.target == "cpu" else []
        subprocess.run([*pin, *command, f"--json={part}"], cwd=ROOT, check=False)
        cores.put(core)

    others = [quiet.others()]
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(run, nets))
    others.append(quiet.others())
    join(out, {"others": others, "processes": options.processes})


def join(out: Path, machine: dict[str, Any]) -> None:
    """Join the results of single nets, in files beside `out`, into it."""
    parts = {p: json.loads(p.read_text()) for p in sorted(out.parent.glob(f"{out.stem}.*.json"))}
    if not parts:
        return
    last = max(parts.values(), key=lambda p: p["machine"]["date"])
    rows = [row for part in parts.values() for row in part["rows"]]
    joined = last | {"machine": last["machine"] | machine, "rows": rows}
    out.write_text(json.dumps(joined, separators=(",", ":")) + "\n")
    for part in parts:
        part.unlink()


@contextlib.contextmanager
def _pool(jobs: int) -> Iterator[Callable[..., concurrent.futures.Future[Build]]]:
    """Return what runs a function now, or in one of several processes."""
    if jobs > 1:
        with concurrent.futures.ProcessPoolExecutor(
            jobs, multiprocessing.get_context("spawn")
        ) as pool:
            yield pool.submit
        return

    class Deferred:
        """The result of a call that is made when it is asked for."""

        def __init__(self, function: Callable[..., Build], *args: Any) -> None:
            self._call = lambda: function(*args)

        def result(self) -> Build:
            """Call the function."""
            return self._call()

    yield Deferred  # type: ignore[misc]


def tables(results: dict[str, Any]) -> str:
    """Return the rows of a target in Markdown: one line per pass, preference and threshold."""
    facts, target = results["machine"], results["target"]
    rows = results["rows"]
    titles = {n: net.title for n, net in NETS[target].items()}
    measured = list(dict.fromkeys(r["net"] for r in rows))
    same = [r for r in rows if r["kind"] == "itself"]
    worst = max((abs(r["ratio"] - 1) for r in same), default=0.0)
    side = f" --processes {facts['processes']}" if facts.get("processes") else ""
    clock = "wall-clock time" if target == "cuda" else "processor time, one thread,"
    parts = [
        f"{facts['date']}, commit {facts['commit']}: `python -m benchmarks.passes --target "
        f"{target}{side}`, {facts.get('gpu') or facts['cpu']}, onnxruntime "
        f"{facts['versions']['onnxruntime']}; {clock} of whole steps with AdamW. Nets: "
        + "; ".join(titles[n] for n in measured)
        + f". A build compared with itself differs from 1 by at most {worst:.1%}."
        " `needed`: nets whose step does not run without it.",
        *page.busy(facts),
    ]
    for kind in ("pass", "preference", "threshold"):
        lines = []
        for name in dict.fromkeys(r["name"] for r in rows if r["kind"] == kind):
            of = [r for r in rows if r["name"] == name and r["changes"]]
            lines.append([f"`{name}`", *_summary(of, with_memory=target == "cuda")])
        head = [kind, "nets it changes", "needed", "faster", "slower"]
        head += ["best (with / without)", "worst"]
        head += ["memory"] if target == "cuda" else []
        if lines:
            parts.append(report.markdown(head, lines, left=1))
    return "\n\n".join(parts)


def _summary(rows: list[dict[str, Any]], *, with_memory: bool) -> list[str]:
    count, rows = len(rows), [r for r in rows if "ratio" in r]
    faster = [r for r in rows if effect(r) < 0]
    slower = [r for r in rows if effect(r) > 0]
    cells = [str(n) for n in (count, count - len(rows), len(faster), len(slower))]
    for some, choose in ((faster, min), (slower, max)):
        best = choose(some, key=lambda r: r["ratio"], default=None)
        cells.append("" if best is None else f"{_spread(best)}, {best['net']}")
    if with_memory:
        saved = min(
            (r for r in rows if r["with_mb"] and r["without_mb"]),
            key=lambda r: r["with_mb"] / r["without_mb"],
            default=None,
        )
        few = saved is None or saved["with_mb"] > 0.98 * saved["without_mb"]
        cells.append(
            ""
            if few or saved is None
            else f"{saved['with_mb']:,} of {saved['without_mb']:,} MB ({saved['net']})"
        )
    return cells


def _spread(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.3f} ({row['low']:.3f}-{row['high']:.3f})"


def facts(target: str) -> dict[str, Any]:
    """Return what a run was made on."""
    found = machine.facts()
    if target == "cuda":
        import torch

        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def write() -> None:
    """Write the tables of the stored results into the page."""
    for target in NETS:
        path = page.RESULTS / f"passes_{target}.json"
        if path.exists():
            page.write(tables(json.loads(path.read_text())), f"passes {target}", PAGE)


def _names(text: str | None, known: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    names = list(known) if text is None else text.split(",")
    unknown = [n for n in names if n not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)} (expected some of {', '.join(known)})")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", choices=list(NETS), default="cpu")
    parser.add_argument("--nets", help="names, separated by commas; default: all of the target")
    parser.add_argument("--passes", help="passes, preferences and thresholds; default: all")
    parser.add_argument("--repeats", type=int, help="repetitions, each with new trainers")
    parser.add_argument("--jobs", type=int, default=1, help="processes that build")
    parser.add_argument("--processes", type=int, help="nets that are measured side by side")
    parser.add_argument("--models", type=Path, help="folder of exported nets")
    parser.add_argument("--export", action="store_true", help="export the nets and stop")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/passes_TARGET.json")
    parser.add_argument("--sizes", nargs="*", metavar="THRESHOLD", help="measure sizes around each")
    parser.add_argument("--write", action="store_true", help="write docs/speed.md from the results")
    options = parser.parse_args()
    if options.sizes is not None:
        sizes = _names(",".join(options.sizes) or None, list(thresholds.CASES), parser)
        thresholds.run(sizes, write=options.write)
        return
    if options.write:
        write()
        return
    target = options.target
    options.repeats = options.repeats or REPEATS[target]
    options.models = options.models or ROOT / ".cache" / "passes" / target
    nets = [NETS[target][n] for n in _names(options.nets, list(NETS[target]), parser)]
    if options.export:
        for net in nets:
            print(net.export(options.models))
        return
    every = switches(target)
    names = _names(options.passes, [s.name for s in every], parser)
    out = options.json or page.RESULTS / f"passes_{target}.json"
    if options.processes:
        side_by_side(nets, options, out)
        return
    results = json.loads(out.read_text()) if out.exists() else {"target": target, "rows": []}
    results["machine"] = facts(target) | {"others": [quiet.others()]}
    known = {(r["net"], r["name"]) for r in results["rows"]}

    def keep(row: dict[str, Any]) -> None:
        rest = [r for r in results["rows"] if (r["net"], r["name"]) != (row["net"], row["name"])]
        results["rows"] = [*rest, row]
        out.write_text(json.dumps(results, separators=(",", ":")) + "\n")
        if "ratio" in row:
            said = {-1: "faster", 0: "no effect", 1: "slower"}[effect(row)]
            print(f"{row['net']}, {row['name']}: {_spread(row)} {said}", flush=True)

    for net in nets:
        try:
            measure(net, target, [s for s in every if s.name in names], options, keep, known)
        except Exception as error:  # the other nets are measured all the same
            print(f"{net.name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        results["machine"]["others"].append(quiet.others())
    out.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
