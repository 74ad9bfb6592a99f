"""The trainer: steps, evaluation, prediction, weights and checkpoints on stock onnxruntime.

:class:`Trainer` keeps learning rate, step counter and random seed, and turns batches into the
inputs of a :class:`~onnxtrain.training.engine.StepEngine`, which runs the models. The loop over a
data set is in :mod:`onnxtrain.training.fit`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

import numpy as np

from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.artifacts.build_options import GRAD_NORM
from onnxtrain.artifacts.directory import split_tensors
from onnxtrain.artifacts.display import Row, SummaryRepr
from onnxtrain.checkpoint import load_checkpoint, save_checkpoint, state_key
from onnxtrain.errors import (
    BusyError,
    CheckpointError,
    OnnxTrainError,
    ShapeError,
    UncopiableError,
    argument,
    by_caller,
)
from onnxtrain.graph.io import Source
from onnxtrain.manifest import ModelSpec, TensorSpec
from onnxtrain.optim.schedules import ScheduleLike
from onnxtrain.options import from_arguments
from onnxtrain.runtime import session as runtime
from onnxtrain.runtime.devices import Device, check, find
from onnxtrain.runtime.feeds import Feeder, feed, numpy_dtype, to_array
from onnxtrain.runtime.ort_values import CONTROL, ort_value
from onnxtrain.training import inference
from onnxtrain.training.callbacks import Callback, Record
from onnxtrain.training.checks import (
    SEED_LIMIT,
    LoadedCheckpoint,
    Progress,
    check_lr,
    check_origin,
    first_nonfinite,
    graph_digests,
    is_finite,
)
from onnxtrain.training.columns import arrays_of, class_names, class_properties
from onnxtrain.training.continual import ReplayBuffer, consolidate
from onnxtrain.training.data import (
    Batch,
    Transform,
    as_source,
    columns_of,
    is_table,
    with_targets,
)
from onnxtrain.training.distributed import CHECK_STEPS, Workers, join, versions
from onnxtrain.training.engine import StepEngine, control_values, require_spec, resolve_layout
from onnxtrain.training.evaluation import Evaluation, evaluate, mean_over
from onnxtrain.training.fit import FitOptions, History, Run, lock_directory
from onnxtrain.training.labels import explain_label_error
from onnxtrain.training.metrics import Metrics, MetricsLike
from onnxtrain.training.profiler import StepProfile, profile_steps
from onnxtrain.training.progress import Display
from onnxtrain.training.results import Outputs, Parameters, StepResult
from onnxtrain.training.verify import FirstSteps

logger = logging.getLogger(__name__)

_EVALUATION_BATCH = 256
_SEED_OF_WORKERS = 7919
"""Distance of the random seeds of two workers."""
_EQUAL_STEPS = 8
"""Steps with equal parts after which workers expect equal parts."""
P = ParamSpec("P")
R = TypeVar("R")


class ThreadGuard:
    """A region for one thread at a time, which may enter it repeatedly; others get an error."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "another thread is using this trainer\n"
                "hint: create one trainer per thread; they can share the artifacts"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


def exclusive(
    method: Callable[Concatenate[Trainer, P], R],
) -> Callable[Concatenate[Trainer, P], R]:
    """Return a method that raises an error while another thread uses the trainer."""

    @functools.wraps(method)
    def call(self: Trainer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.in_use:
            return method(self, *args, **kwargs)

    return call


def _build(model: Artifacts | Source, device: Device, options: dict[str, Any]) -> Artifacts:
    """Return artifacts of a model for the target of a device.

    Raises:
        TypeError: if the options are not those of ``build``, or no model is given.
    """
    if "loss" not in options or isinstance(model, Artifacts):
        raise TypeError(f"Trainer() got an unexpected keyword argument {min(options)!r}")
    return build(model, **{"target": device.target, **options})


class Trainer(SummaryRepr):
    """Runs training steps of artifacts on onnxruntime, for one thread at a time.

    Args:
        artifacts: the result of :func:`onnxtrain.build`, or a directory. Or a model, with
            arguments of ``build`` such as ``loss=`` and ``optimizer=``: it is built for the target
            of the device.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"openvino"``, ``"webgpu"`` or another name of
            the page "Devices", or the name of an execution provider of onnxruntime. In a
            distributed run, ``"cuda"`` is the GPU of ``LOCAL_RANK``.
        layout: how a step runs. ``"fused"``: one model computes new parameters and state.
            ``"separate"``: one model accumulates gradients, a second one updates. ``"vector"``: one
            model computes gradients, and updates run over vectors of many parameters. ``"auto"``
            picks the fastest. All compute the same values (``"vector"`` with SGD up to rounding).
        seed: random seed for dropout and shuffling.
        threads: size of onnxruntime's thread pool; ``None`` uses all cores.
        capture: on CUDA, capture a step as a CUDA graph and replay it. ``None`` does so where the
            artifacts allow it: all sizes fixed by ``build(dims=...)``, no control flow.
        distributed: ``"auto"`` makes this trainer one worker of the process group that the program
            has initialized, or of ``torchrun``; without either, it trains alone. Workers take equal
            parts of every batch and sum their gradients. ``True`` requires a group.
        shard_state: in a distributed run, each worker holds and updates only its part of the
            optimizer state (ZeRO stage 1), with the same results. Then all workers must call
            :meth:`save` together.
        provider_options: options of the execution provider, besides the defaults of the device.
        allow_cpu_fallback: accept that most nodes of a model run on the CPU, which is an error
            otherwise.
        verify: run the first two steps on the CPU as well, and raise an error that names the first
            node whose values differ. By default on devices that are marked untested.
        **build_options: arguments of :func:`onnxtrain.build`, if ``artifacts`` is a model.
    """

    replay: ReplayBuffer | None = None
    """Rows of earlier data; checkpoints contain them."""
    # Created when they are first used.
    _eval_session: Any = None
    _predictor: inference.Predictor | None = None
    _gradient_engine: StepEngine | None = None
    _graph_digests: dict[str, str] | None = None
    # Of the last batch: rows of this worker and of all.
    _share: tuple[float, float] = (1, 1)
    # Of the gradients: the factor of this worker in the sum over workers, and their norm.
    _factor = 1.0
    _norm: float | None = None
    _equal_steps = 0
    _wait_for_sums: Callable[[], None] | None = None
    part_outputs: Mapping[str, np.ndarray] = MappingProxyType({})
    """Results of this worker's part of the last batch."""

    def __init__(
        self,
        artifacts: Artifacts | Source,
        *,
        device: str | Device = "cpu",
        layout: str = "auto",
        seed: int = 0,
        threads: int | None = None,
        capture: bool | None = None,
        distributed: str | bool | None = None,
        shard_state: bool = False,
        provider_options: Mapping[str, Any] | None = None,
        allow_cpu_fallback: bool = False,
        verify: bool | None = None,
        **build_options: Any,
    ) -> None:
        entry = find(device, provider_options, allow_cpu_fallback=allow_cpu_fallback)
        if build_options:
            artifacts = _build(artifacts, entry, build_options)
        loaded = not isinstance(artifacts, Artifacts)
        if not isinstance(artifacts, Artifacts):
            artifacts = Artifacts.load(cast(str, artifacts))
        check(entry)
        self.workers = join(distributed, str(entry))
        """The workers of a distributed run; ``None`` if the trainer trains alone."""
        if self.workers is not None:
            entry = dataclasses.replace(entry, index=find(self.workers.device).index)
            threads = self.workers.threads if threads is None and entry.on_host else threads
            verify = False
        # One worker has nobody to communicate with.
        self._peers = self.workers if self.workers and self.workers.size > 1 else None
        shard_state = shard_state and self._peers is not None
        if shard_state and layout == "auto":
            layout = "separate"
        self.layout = resolve_layout(artifacts, layout, entry, distributed=self._peers is not None)
        """Name of the layout that runs: ``"fused"``, ``"separate"`` or ``"vector"``."""
        if not 0 <= seed < SEED_LIMIT:
            raise OnnxTrainError(f"seed must be in [0, {SEED_LIMIT}), got {seed}")
        self.in_use = ThreadGuard()
        self.artifacts, self.manifest = artifacts, artifacts.manifest
        self.device, self.threads, self.seed = str(entry), threads, seed
        self.device_entry = entry
        """The entry of :mod:`onnxtrain.runtime.devices`, with the options of this trainer."""
        self.lr = self.manifest.optimizer.get("lr")
        self.global_step = 0
        self.properties: dict[str, int | float | str] = {}
        self.best_checkpoint: Path | None = None
        """Checkpoint of the best epoch of the last ``fit`` with ``directory``."""
        self._accumulated = 0
        if artifacts.meta:
            self._set_progress(self._progress.read(artifacts.meta, self.manifest.checkpoint))
            self.seed = seed or self.seed
        self._engine = StepEngine(
            artifacts,
            self.layout,
            device=entry,
            threads=threads,
            capture=capture,
            release=loaded and entry.on_host,
            shard=(self.workers.rank, self.workers.size) if self.workers and shard_state else None,
        )
        if self.workers is None or self.workers.main:
            self._warn_target_mismatch()
        if loaded and entry.on_host:  # the engine's copy of the values is the only one
            self.artifacts = artifacts.with_arrays(self._engine.view_or_zeros)
        self.batch_specs = self._engine.spec.inputs_of("input", "target")
        self._feed = Feeder(self.batch_specs)
        self._control_specs: dict[str, list[TensorSpec]] = {}
        self._outputs = Outputs(self._engine.spec)
        self.loss_name, self.metric_names = self._outputs.loss, self._outputs.metrics
        verify = not entry.tested if verify is None else verify
        self._first_steps = FirstSteps(self) if verify else None
        if self.workers is not None:
            self._meet(self.workers)

    def _meet(self, workers: Workers) -> None:
        """Check that all workers train the same, and start from the values of the first one."""
        if self.manifest.options.get("dp"):
            raise OnnxTrainError(
                "several workers would add their own noise to the gradients\n"
                "hint: differentially private training runs in one process"
            )
        progress = self.progress()
        workers.check_equal(
            {
                "seed": self.seed,
                "model, loss and optimizer": json.dumps(progress["graphs"], sort_keys=True),
                "manifest": json.dumps(progress["manifest"], sort_keys=True),
                "layout": self.layout,
                "shard_state": bool(self._engine.owners),
                **versions(),
            }
        )
        self.share_values()

    def share_values(self) -> None:
        """Give all workers the values and the progress of the first one; not its sharded state."""
        workers = self.workers
        if workers is None:
            return
        if self._engine.owners:
            names = [n for owned in self._engine.owners for n in owned]
            workers.copy_from(0, [self._engine.bytes_of(names)])
            workers.copy_from(0, [self._engine.bytes_of([b.name]) for b in self.manifest.buffers])
        else:
            workers.copy_from(0, [self._engine.bytes_of()])
        self._set_progress(Progress(*workers.on_main(lambda: dataclasses.astuple(self._progress))))

    def __reduce__(self) -> NoReturn:
        raise UncopiableError(
            "a trainer cannot be pickled or copied\n"
            "hint: pickle its artifacts, or save() here and load() in the other trainer"
        )

    def _warn_target_mismatch(self) -> None:
        """Warn if a device runs a model that was built for another target.

        The values are the same, but nodes may fall back to the CPU or be slow on the device.
        """
        spec, target = self._engine.spec, self.device_entry.target
        if self.device_entry.is_cpu or spec.is_for(target):
            return
        message = (
            f"these artifacts were built for target {spec.target!r} and run on {self.device!r}; "
            f'build(..., target="{target}") is faster there'
        )
        logger.warning("%s", message)
        warnings.warn(message, stacklevel=3)

    def summary(self) -> tuple[str, list[Row]]:
        """Return the class name and the rows of the trainer's ``repr``."""
        batch = ", ".join(
            f"{t.name} {t.dtype}[{', '.join(map(str, t.shape))}]" for t in self.batch_specs
        )
        rows = [
            ("batch", batch),
            ("step", str(self.global_step)),
            ("lr", f"{self.lr:g}"),
            ("loss", str(self.manifest.loss.get("name", ""))),
            ("optimizer", str(self.manifest.optimizer.get("name", ""))),
            ("runs on", f"{self.device}, layout {self.layout}, seed {self.seed}"),
        ]
        return "Trainer", rows

    @property
    def lr(self) -> float:
        """The learning rate: an input of the step, so setting it costs nothing."""
        return self._lr

    @lr.setter
    def lr(self, value: Any) -> None:
        self._lr = check_lr(value, "lr")

    @property
    def captured(self) -> bool:
        """Whether steps are captured as a CUDA graph and replayed."""
        return self._engine.captured

    @property
    def capture_obstacle(self) -> str | None:
        """Why steps are not captured as a CUDA graph; ``None`` if they are."""
        return self._engine.capture_obstacle

    def placement(self, **sizes: int) -> dict[str, runtime.Placement]:
        """Return where the nodes of each model of a step run, and what is copied between devices.

        Parameters and optimizer state of devices without memory of their own are on the CPU, and
        so are the update models.

        Args:
            **sizes: values of symbolic sizes, such as ``batch=32``, to count the bytes of copies.
        """
        return {
            entry.spec.role: runtime.placement(entry.source, device=entry.device, sizes=sizes)
            for entry in self._engine.sessions
        }

    @property
    def step_models(self) -> tuple[bytes | str, ...]:
        """The models that a step runs, for :func:`onnxtrain.runtime.session.placement`."""
        return tuple(entry.source for entry in self._engine.sessions)

    @property
    def inputs(self) -> list[str]:
        """Names of a batch's inputs and targets, in the order of positional arguments."""
        return [t.name for t in self.batch_specs]

    @property
    def classes(self) -> dict[str, list[str]]:
        """Class names by target, in the order of their indices; checkpoints contain them.

        ``fit`` sets them if labels are texts.
        """
        return class_names(self.properties)

    @classes.setter
    def classes(self, names: Mapping[str, Sequence[str]]) -> None:
        self.properties |= class_properties(names)

    @property
    def fixed_batch(self) -> int | None:
        """The batch size if the model fixes it, else ``None``."""
        sizes = [t.shape[0] for t in self.batch_specs[:1] if t.shape]
        return next((d for d in sizes if isinstance(d, int)), None)

    @property
    def sharded(self) -> bool:
        """Whether this worker holds a part of the optimizer state only."""
        return bool(self._engine.owners)

    @property
    def last_weight(self) -> float:
        """Number of rows or tokens of all workers in the last batch."""
        return self._share[1]

    @property
    def accumulating(self) -> bool:
        """Whether accumulated gradients wait for an update."""
        return self._accumulated > 0

    @exclusive
    def step(self, *batch: Any, **named: Any) -> StepResult:
        """Train on one batch, given by position or by name.

        If the loss is infinite or NaN, no parameter changes, and ``updated`` is false. With loss
        scaling, a batch of finite values then halves the scale. The same holds for a finite loss
        of infinite inputs whose gradient is NaN.

        Raises:
            ShapeError: if the batch or a label does not fit the model; nothing changes then.
        """
        feeds = self._feed(batch, named)
        outputs = self.compute(feeds, weight=Batch(dict(feeds)).size)
        finite = all(map(is_finite, feeds.values()))
        if is_finite(outputs[self.loss_name]) and (finite or self._can_update()):
            return self.commit(outputs)
        if self._peers is not None:
            finite = all(self._peers.gather(finite))
        if self.manifest.options.get("loss_scale") and finite:
            return dataclasses.replace(self.commit(outputs), updated=False)
        return self._outputs.result(outputs, self.global_step + 1, updated=False)

    def _can_update(self) -> bool:
        """Return whether the update of the last :meth:`compute` is finite, or is checked later."""
        if self._peers is not None or self.manifest.options.get("loss_scale"):
            return True
        return first_nonfinite(self.pending_updates()) is None

    @exclusive
    def compute(self, feeds: Mapping[str, np.ndarray], weight: float = 1) -> dict[str, np.ndarray]:
        """Run a step on arrays of the right shapes and types; :meth:`commit` makes it current.

        Args:
            feeds: the arrays by name.
            weight: of this worker's part in a distributed run: its number of rows or tokens. The
                results are means over all parts. With 0, the part is empty and ``feeds`` not read.
        """
        workers, self._share = self._peers, (weight, weight)
        if workers is None:
            self.part_outputs = outputs = self._compute(feeds)
            return outputs
        self._finish_sums()
        known = self._equal_steps >= _EQUAL_STEPS
        rows = None if known else workers.start_add([weight])
        self.part_outputs = outputs = self._compute(feeds) if weight else {}
        self._sum_gradients(workers, weight, weight * workers.size if rows is None else rows()[0])
        total, equal, means = mean_over(workers, self._outputs, outputs, weight)
        if known and not equal:
            self._finish_sums()
            if weight:
                self._compute(feeds)
            self._sum_gradients(workers, weight, total)
        self._equal_steps = self._equal_steps + 1 if equal else 0
        return {**outputs, **means}

    def _sum_gradients(self, workers: Workers, weight: float, total: float) -> None:
        """Weigh the gradients of a batch; start to sum them after the last micro-batch."""
        self._share = (weight, total)
        self._weigh(workers)
        if self._accumulated + 1 >= self.manifest.accumulate:
            self._start_sums(workers, pending=True)

    def _compute(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self._check_batch_size(feeds)
        control = self._control(self._engine.spec, self.global_step + 1, batch=self._accumulated)
        if self._first_steps is not None and not self._accumulated:
            self._first_steps.start()
        try:
            outputs = self._engine.compute({**feeds, **control})
        except OnnxTrainError as error:
            raise explain_label_error(self, error, feeds) from error
        if self._first_steps is not None:
            self._first_steps.compute(feeds, control, outputs)
        return outputs

    @exclusive
    def commit(self, outputs: Mapping[str, np.ndarray]) -> StepResult:
        """Make the last :meth:`compute` current; update parameters after ``accumulate`` batches.

        A loss that is infinite or NaN makes the parameters so, too: :meth:`step` checks it first.
        """
        number = self.global_step + 1
        if self._share[0]:
            self._engine.commit()
        else:
            self._engine.skip()
        if self._first_steps is not None:
            self._first_steps.commit()
        self._accumulated += 1
        updated = self._accumulated >= self.manifest.accumulate
        if updated:
            self._update()
        if self._norm is not None:
            outputs = {**outputs, GRAD_NORM: np.array(self._norm, np.float32)}
        return self._outputs.result(outputs, number, updated=updated)

    def _weigh(self, workers: Workers) -> None:
        """Make the gradients of this batch relative to the share of the first micro-batch.

        Shares are usually equal: then the sum is multiplied once, before the update.
        """
        rows, total = self._share
        # The vector layout has no factor for the mean over workers in its update.
        count = 1 if self.layout == "vector" else workers.size
        factor = rows * count / total if rows else 0.0
        if not self._accumulated:
            self._factor = factor or 1.0
        if factor != self._factor:
            vectors = self._engine.gradient_vectors()
            if not self._accumulated:
                vectors = [(vector, None) for vector, _ in vectors]
            workers.weigh(vectors, factor / self._factor)

    def _start_sums(self, workers: Workers, *, pending: bool) -> None:
        """Start to sum the gradients of all workers."""
        vectors = self._engine.gradient_vectors(pending=pending)
        if self._factor != 1.0:
            workers.weigh([(vector, None) for vector, _ in vectors], self._factor)
        self._wait_for_sums = workers.start_add_in_place([vector for vector, _ in vectors])

    def _finish_sums(self) -> None:
        """Wait for the sums of gradients, if they are under way."""
        wait, self._wait_for_sums = self._wait_for_sums, None
        if wait is not None:
            wait()

    @exclusive
    def flush(self) -> bool:
        """Update with the gradients accumulated so far; return ``False`` if there are none."""
        if not self._accumulated:
            return False
        self._update()
        return True

    def _update(self) -> None:
        number = self.global_step + 1
        spec, control, workers = self._engine.control_spec, {}, self._peers
        scale = 1.0 / self._accumulated
        if workers is not None:
            if self._wait_for_sums is None:  # flush, before the last micro-batch
                self._start_sums(workers, pending=False)
            self._finish_sums()
            scale /= 1 if self.layout == "vector" else workers.size
            self._norm = None
            scaled = bool(self._engine.spec.inputs_of("state"))  # by a loss scale
            if GRAD_NORM in self.metric_names and self._accumulated == 1 and not scaled:
                vectors = [vector for vector, _ in self._engine.gradient_vectors(pending=False)]
                self._norm = workers.norm(vectors) * (1 if self.layout == "vector" else scale)
        if spec is not None:
            control = self._control(spec, number, grad_scale=scale)
        self._engine.update_parameters(control)
        if self._first_steps is not None and self._first_steps.update(control):
            self._first_steps = None
        if workers is not None:
            for rank, names in enumerate(self._engine.owners):
                workers.copy_from(rank, [self._engine.bytes_of(names)] if names else [])
        self.global_step, self._accumulated = number, 0
        if number % CHECK_STEPS == 0:
            self.check_workers()

    def check_workers(self) -> None:
        """Raise an error if the parameters of the workers of this run differ."""
        if self.workers is not None:
            names = [p.name for p in self.manifest.parameters]
            self.workers.check_parameters(self._engine.view, names)

    def run_step(self, engine: StepEngine, feeds: Mapping[str, np.ndarray]) -> None:
        """Run a step on another engine, with this trainer's learning rate and step counter."""
        number = self.global_step + 1
        engine.compute({**feeds, **self._control(engine.spec, number)})
        engine.commit()
        spec = engine.control_spec
        engine.update_parameters({} if spec is None else self._control(spec, number))

    def _control(
        self, spec: ModelSpec, number: int, *, batch: int = 0, grad_scale: float = 1.0
    ) -> dict[str, np.ndarray]:
        """Return a model's control inputs.

        Args:
            spec: of the model.
            number: of the step, counted from 1.
            batch: how many batches have been accumulated before this one.
            grad_scale: factor of the accumulated gradients.
        """
        if spec.role not in self._control_specs:
            self._control_specs[spec.role] = spec.inputs_of(*CONTROL)
        # Every batch draws random numbers of its own. float32 is exact below the limit.
        draw = ((number - 1) * self.manifest.accumulate + batch + 1) % SEED_LIMIT
        seed = self.seed  # workers draw masks of their own
        if self.workers is not None:
            seed = (seed + self.workers.rank * _SEED_OF_WORKERS) % SEED_LIMIT
        settings = {"lr": self._lr, "step": number, "rng": (seed, draw)}
        settings |= {"grad_scale": grad_scale, "reset": batch == 0}
        return control_values(self._control_specs[spec.role], settings)

    def _check_batch_size(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Raise an error if BatchNormalization would get a single value per channel.

        Raises:
            ShapeError: with the names of the sizes.
        """
        products = self.manifest.options.get("above_one")
        if not products:
            return
        pairs = [(s, feeds[s.name]) for s in self.batch_specs if s.name in feeds]
        sizes = {d: n for s, a in pairs for d, n in zip(s.shape, a.shape, strict=True)}
        for product in products:
            names = str(product).split("*")
            if all(n in sizes for n in names) and math.prod(sizes[n] for n in names) == 1:
                raise ShapeError(
                    f"{' and '.join(names)} of 1 give BatchNormalization one value per channel; "
                    "training needs more\n"
                    "hint: "
                    + by_caller(
                        "use another batch_size, drop_last=True if it is the last batch of an "
                        "epoch, or build(mode='as-is')",
                        "use another --batch-size, or onnxtrain build ... --mode as-is",
                    )
                )

    @exclusive
    def gradients(self, *batch: Any, **named: Any) -> dict[str, np.ndarray]:
        """Return the gradients of one batch by parameter name; nothing is updated."""
        if self._gradient_engine is None:
            self._gradient_engine = StepEngine(
                self.artifacts,
                "separate",
                device=self.device_entry,
                threads=self.threads,
                update=False,
            )
        engine = self._gradient_engine
        scaler = [t.name for t in engine.spec.inputs_of("state")]
        for name in (*self._weight_names(), *scaler):
            engine.write(name, self._engine.view(name))
        feeds = feed(self.batch_specs, batch, named)
        self._check_batch_size(feeds)
        engine.compute({**feeds, **self._control(engine.spec, self.global_step + 1)})
        scale = self._engine.view(*scaler) if scaler else 1
        gradients = (g for _, g in engine.pending_updates())
        names = [p.name for p in self.manifest.parameters]
        return {n: np.asarray(g / scale, g.dtype) for n, g in zip(names, gradients, strict=True)}

    def consolidate(self, data: Any, y: Any = None, *, max_rows: int | None = None) -> None:
        """Make the weights that this data needs hard to change: elastic weight consolidation.

        Call it after training on the data and before training on other data, with artifacts of an
        optimizer with ``ewc``. It sets the anchors to the parameters, and adds the mean squared
        gradient of single rows, the diagonal of the Fisher information, to that of earlier calls.

        Args:
            data: as in :meth:`fit`.
            y: targets, if ``data`` has only the inputs.
            max_rows: read no more rows; a few hundred are enough.
        """
        consolidate(self, data, y, max_rows=max_rows)

    @exclusive
    def evaluate_batch(self, *batch: Any, **named: Any) -> StepResult:
        """Return loss, metrics and outputs of one batch in evaluation mode."""
        spec = require_spec(self.artifacts, "eval")
        if self._eval_session is None:
            self._eval_session = runtime.create(
                self.artifacts.source("eval"), device=self.device_entry, threads=self.threads
            )
        feeds = feed(spec.inputs_of("input", "target"), batch, named)
        feeds.update(self._control(spec, 0))
        outputs = Outputs(spec)
        weights = [t.name for t in spec.inputs_of("parameter", "buffer")]
        if self.device_entry.on_host:
            feeds.update({n: self._engine.view(n) for n in weights})
            try:
                arrays = runtime.run(self._eval_session, outputs.names, feeds)
            except OnnxTrainError as error:
                raise explain_label_error(self, error, feeds) from error
        else:  # weights are read where they are, on the device
            values = {n: ort_value(a, self.device_entry) for n, a in feeds.items()}
            values.update({n: self._engine.value(n) for n in weights})
            results = runtime.run_values(self._eval_session, outputs.names, values)
            arrays = [np.array(r.numpy()) for r in results]
        arrays = dict(zip(outputs.names, arrays, strict=True))
        return outputs.result(arrays, self.global_step, updated=False)

    def evaluate(
        self,
        data: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        metrics: MetricsLike = (),
    ) -> Evaluation:
        """Return loss and metrics over all of ``data``, in evaluation mode.

        Args:
            data: as in :meth:`fit`.
            y: targets, if ``data`` has only the inputs.
            batch_size: for arrays; 256, or the fixed batch size of the model.
            metrics: further metrics, as in :meth:`fit`.
        """
        fixed = self.fixed_batch
        source = as_source(
            with_targets(data, y),
            self.batch_specs,
            batch_size=batch_size or fixed or _EVALUATION_BATCH,
            drop_last=fixed is not None,
            classes=self.classes,
        )
        return evaluate(self, source, Metrics(self, metrics))

    def fit(
        self,
        data: Any,
        y: Any = None,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        validation: Any = None,
        metrics: MetricsLike = (),
        schedule: ScheduleLike | None = None,
        warmup: float | None = None,
        callbacks: Sequence[Callback | Callable[[Run, Record], None]] = (),
        progress: bool | str | Display = True,
        directory: str | os.PathLike[str] | None = None,
        resume: bool = False,
        checkpoint_every: int | None = None,
        keep: int | None = None,
        monitor: str | None = None,
        patience: int | None = None,
        shuffle: bool | None = None,
        drop_last: bool | None = None,
        transform: Transform | None = None,
        debug_nan: bool = False,
        tensorboard: bool | None = None,
    ) -> History:
        """Train for some epochs; return the losses and metrics of the run.

        The first Ctrl-C ends the run after the current step, with a checkpoint if ``directory`` is
        set. A resumed run keeps every option that is not given again, and prints which: epochs,
        batch size, learning rate, schedule, order of the data. Data, validation data and callbacks
        must be given again.

        Args:
            data: a dict of arrays (by name) or a tuple of arrays (by position), a table (pandas,
                polars, Arrow, Hugging Face ``Dataset``), the path of a file, or a :class:`Stream`
                of rows that do not fit into memory, which are shuffled and cut into batches; an
                iterable of batches such as a list or torch's DataLoader;
                or a function from the epoch to such an iterable.
            y: targets, if ``data`` has only the inputs.
            epochs: number of passes over the data, including those before a resumed checkpoint; 1.
            batch_size: for arrays; 32, or the fixed batch size of the model.
            lr: learning rate, which the schedule multiplies; the trainer's own by default.
            validation: data to evaluate on after each epoch, or a fraction: ``0.2`` takes a random
                20 % of the rows, depending on the seed only, and trains on the others.
            metrics: metrics of the validation data, besides those of ``build``: names
                (``["f1", "auc"]``), functions ``f(targets, predictions)`` of arrays as in
                scikit-learn, or objects of torchmetrics; a dict names them. Records have them as
                ``val_f1``. Predictions are those of the model's output; functions of scikit-learn
                get class labels or probabilities.
            schedule: learning rate schedule: a name such as ``"cosine"``, an object of
                :mod:`onnxtrain.optim.schedules`, or a function from the step, counted from 1, to
                the learning rate. A resumed run keeps its schedule unless one is given, and
                stretches it to the new number of steps; a function must be given again.
            warmup: warm-up steps, or a fraction of all steps if below 1.
            callbacks: :class:`Callback` objects, or functions of the run and each epoch's record.
            progress: ``True`` for a bar in a terminal and lines elsewhere, ``"bar"``, ``"plain"``
                or ``False``; or a display object.
            directory: directory for metrics, loss curve and checkpoints; none are written without.
            resume: continue from the last checkpoint in ``directory``, if there is one.
            checkpoint_every: steps between checkpoints, besides the one after each epoch.
            keep: number of recent checkpoints to keep, 3; the best one is kept as well.
            monitor: value that decides which epoch is best; ``val_loss``, else ``loss``.
                ``"max:val_iou"`` says that larger values are better where the name does not.
            patience: stop after this many epochs without an improvement.
            shuffle: whether to shuffle arrays in each epoch; ``True`` by default.
            drop_last: drop the last batch of an epoch if it is smaller.
            transform: changes each training batch, for augmentation: a function of a dict of
                arrays, and of a numpy random generator if it takes one, that returns the dict. The
                generator depends on seed, epoch and batch, so that a resumed run has the same.
            debug_nan: check every update, and find the node that computes the first NaN.
            tensorboard: write event files; by default if TensorBoard is installed.

        Raises:
            BusyError: if another thread uses the trainer, or another run the directory.
            NonFiniteError: if the loss becomes infinite or NaN; the weights are those before that
                step. Also if weights become infinite or NaN after a finite loss; no checkpoint
                contains them.
        """
        options = from_arguments(FitOptions, locals())
        main = self.workers is None or self.workers.main
        with self.in_use, lock_directory(options.directory if main else None):
            return Run(self, with_targets(data, y), options).go()

    @exclusive
    def profile(
        self, batch: Any, *, steps: int = 10, trace: str | os.PathLike[str] | None = None
    ) -> StepProfile:
        """Measure where the time of a training step goes; ``print`` the result.

        The steps run on copies of the weights, with onnxruntime's profiler: the trainer does not
        change.

        Args:
            batch: a tuple of arrays (by position) or a dict of arrays (by name).
            steps: number of steps to average over, after two that are not measured.
            trace: path of a Chrome trace to write, for chrome://tracing or Perfetto.
        """
        report = profile_steps(self, batch, steps=steps)
        if trace is not None:
            report.save_trace(trace)
        return report

    @exclusive
    def predict(self, *positional: Any, **inputs: Any) -> dict[str, np.ndarray]:
        """Return the outputs of the inference model with the current weights, by name.

        Args:
            *positional: the inputs in their order; or one dict or table, whose other columns are
                not read.
            **inputs: the inputs by name.
        """
        if self._predictor is None:
            self._predictor = inference.Predictor(
                self.artifacts, device=self.device_entry, threads=self.threads
            )
        specs = self._predictor.spec.inputs
        if len(positional) == 1 and is_table(positional[0]):
            targets = [t for t in self.batch_specs if t.role == "target"]
            columns = columns_of(positional[0], specs) or {}
            named, _ = arrays_of(columns, specs, {}, others=targets)
            positional, inputs = (), {**named, **inputs}
        feeds = feed(specs, positional, inputs)
        try:
            return self._predictor.run(feeds, self._engine.view)
        except OnnxTrainError as error:
            raise explain_label_error(self, error, feeds) from error

    @property
    def parameters(self) -> Parameters:
        """The parameters by name: read with ``[...]``, set with ``[...] = array``."""
        specs = {p.name: p for p in self.manifest.parameters}
        return Parameters(specs, self._engine.view, self._engine.write)

    @property
    def buffers(self) -> Parameters:
        """Running statistics by name, read and set like :attr:`parameters`."""
        specs = {b.name: b for b in self.manifest.buffers}
        return Parameters(specs, self._engine.view, self._engine.write, "buffer")

    def view(self, name: str) -> np.ndarray:
        """Return a parameter, buffer or state tensor without a copy; valid until the next step."""
        return self._engine.view(name)

    def pending_updates(self) -> list[tuple[str, np.ndarray]]:
        """Return the result of :meth:`compute` for each parameter: its new value or gradient."""
        self._finish_sums()
        return self._engine.pending_updates()

    def debug_feeds(
        self, feeds: Mapping[str, np.ndarray]
    ) -> tuple[bytes | str, dict[str, np.ndarray]]:
        """Return the model that runs on a batch and all of its inputs, to run it again."""
        spec = self._engine.spec
        values = {**feeds, **self._control(spec, self.global_step + 1, batch=self._accumulated)}
        for t in spec.inputs:
            if t.name in values:
                continue
            if t.role == "accumulator":
                shape = tuple(d for d in t.shape if isinstance(d, int))
                values[t.name] = np.zeros(shape, numpy_dtype(t.dtype))
            else:
                values[t.name] = self._engine.view(t.name)
        return self.artifacts.source(spec.role), values

    def _weight_names(self) -> list[str]:
        return [w.name for w in (*self.manifest.parameters, *self.manifest.buffers)]

    @exclusive
    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all tensors of a checkpoint, by their names there.

        With ``shard_state``, all workers must call it, and the first one gets all of the state.
        """
        engine = self._engine
        state = {n: np.array(engine.view(n)) for n in self._weight_names()}
        slots = {s.name: state_key(s.parameter, s.slot) for s in self.manifest.state}
        own = {slots[n]: np.array(engine.view(n)) for n in slots if engine.has(n)}
        if self.workers is not None and engine.owners:
            for part in self.workers.collect(own):
                own |= part
        return state | {key: own[key] for key in slots.values() if key in own}

    def load_state_dict(self, tensors: Mapping[str, Any]) -> None:
        """Set all tensors from a :meth:`state_dict`; nothing changes if one does not fit."""
        self._set_all(self._arrays({n: to_array(v) for n, v in tensors.items()}, "the state"))

    def _arrays(self, tensors: Mapping[str, np.ndarray], label: str) -> dict[str, np.ndarray]:
        values, state = split_tensors(self.manifest, tensors, label)
        return {**values, **state}

    @exclusive
    def _set_all(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            self._engine.write(name, array)
        self._accumulated = 0

    @exclusive
    def load_weights(
        self, weights: Mapping[str, Any] | str | os.PathLike[str], *, strict: bool = True
    ) -> list[str]:
        """Set parameters and buffers from a state_dict or a safetensors file; return the names set.

        Args:
            weights: arrays or tensors by name, or a path.
            strict: raise an error for unknown and missing names.
        """
        if isinstance(weights, str | os.PathLike):
            weights = load_checkpoint(weights)[0]
        arrays = inference.match_weights(weights, self.manifest, strict=strict)
        for name, array in arrays.items():
            self._engine.write(name, array.astype(self._engine.view(name).dtype))
        return list(arrays)

    def progress(self) -> dict[str, Any]:
        """Return the metadata of a checkpoint."""
        if self._graph_digests is None:
            self._graph_digests = graph_digests(self.artifacts)
        return {
            "graphs": self._graph_digests,
            "lr": self.lr,
            "manifest": self.manifest.to_dict(hashes=False),
            "properties": self.properties,
            "seed": self.seed,
            "step": self.global_step,
        }

    @property
    def _progress(self) -> Progress:
        return Progress(self.lr, self.global_step, self.seed, self.properties)

    def _set_progress(self, progress: Progress) -> None:
        self.lr, self.global_step, self.seed, self.properties = dataclasses.astuple(progress)

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint; if that fails, the old file stays.

        In a distributed run, worker 0 writes it.
        """
        if self._accumulated:
            raise OnnxTrainError(
                "gradients are accumulated but not applied\nhint: call flush() before save()"
            )
        main = self.workers is None or self.workers.main
        tensors = self.state_dict() if main or self._engine.owners else {}
        if main:
            meta = {**self.progress(), **(extra or {})}
            if self.replay is not None:
                tensors = tensors | self.replay.tensors()
                meta["replay"] = self.replay.metadata()
            save_checkpoint(path, tensors, meta)

    def load(self, path: str | os.PathLike[str], *, strict: bool = True) -> dict[str, Any]:
        """Continue from a checkpoint; return its metadata. Nothing changes if it does not fit.

        Args:
            path: of the file.
            strict: raise an error if another model, loss or optimizer wrote the checkpoint;
                otherwise the metadata lists the differences under ``"differences"``.
        """
        loaded = self.read(path, strict=strict)
        self.restore(loaded)
        return loaded.meta

    def read(self, path: str | os.PathLike[str], *, strict: bool = True) -> LoadedCheckpoint:
        """Return a checkpoint that :meth:`restore` accepts; nothing changes."""
        tensors, meta = load_checkpoint(path)
        label = repr(os.fsdecode(path))
        if "step" not in meta:
            raise CheckpointError(
                f"{label} has no training progress\nhint: "
                + by_caller(
                    "load_weights() loads plain weights", "pass a checkpoint that a run has written"
                )
            )
        arrays, progress = self._arrays(tensors, label), self._progress.read(meta, label)
        replay = ReplayBuffer.restore(tensors, meta, label)
        meta = check_origin(meta, self.progress(), label, strict=strict)
        return LoadedCheckpoint(arrays, progress, meta, replay)

    def restore(self, loaded: LoadedCheckpoint) -> None:
        """Continue from the result of :meth:`read`."""
        self._set_all(loaded.arrays)
        self._set_progress(loaded.progress)
        self.replay = loaded.replay or self.replay

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        best: bool = False,
        ema: bool = False,
        fold: bool = False,
        opset: int | None = None,
        training_info: bool = False,
    ) -> None:
        """Write the inference model with the current weights.

        Args:
            path: of the file.
            best: write the weights of the best epoch of the last ``fit`` with ``directory``.
            ema: write the moving average of the weights.
            fold: fold constants, such as a normalization into the convolution before it; names of
                weights may change.
            opset: opset version of the file; the model's own by default.
            training_info: include the training step and the optimizer's state as the ONNX standard
                has them, so that :meth:`Artifacts.from_training_info` continues.
        """
        if training_info:
            if best or ema or fold or opset is not None:
                others = by_caller("best=, ema=, fold= and opset=", "--ema, --fold and --opset")
                raise OnnxTrainError(
                    f"{argument('training_info')} writes the model as it trains\n"
                    f"hint: leave out {others}"
                )
            trained = self.artifacts.with_arrays(self.view)
            trained.meta = {**trained.meta, **self.progress()}
            trained.to_training_info(path)
            return
        read = self.view
        if best:
            if self.best_checkpoint is None or not self.best_checkpoint.exists():
                raise OnnxTrainError(
                    "no run of this trainer has saved its best epoch\n"
                    "hint: fit(..., directory='runs/first') saves it; for an earlier run, "
                    "trainer.load('runs/first/checkpoints/best.safetensors') before export"
                )
            read = self.read(self.best_checkpoint).arrays.__getitem__
        inference.export(self, path, read, ema=ema, fold=fold, opset=opset)
