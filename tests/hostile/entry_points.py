"""Pass mutated models, checkpoints and artifact directories to their entry points."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.checker
import onnx.shape_inference
import onnx_ir as ir

import onnxtrain
from onnxtrain.errors import OnnxTrainError, VerificationError
from onnxtrain.runtime import session as runtime
from tests.artifacts.models import classifier
from tests.hostile.mutate import mutant
from tests.hostile.mutate_files import CHECKPOINT, DIRECTORY, damage_directory, damaged_checkpoint
from tests.hostile.run import COMPARE, Step, WrongError
from tests.hostile.traps import SECRET, Traps

_DIFFERS, _DOES_NOT_RUN = "differs from the original", "the lowered model does not"
_SIZE = 3  # of symbolic dimensions


def steps_of_case(seed: int, traps: Traps) -> tuple[str, Iterator[Step]]:
    """Return the name of a case and the entry points to call, in order.

    A case ends if its first step raises a named error.
    """
    if seed % 20 == CHECKPOINT:
        return "checkpoint", _checkpoint_steps(seed, traps)
    if seed % 20 == DIRECTORY:
        return "directory", _directory_steps(seed, traps)
    name, data = mutant(seed)
    return name, _model_steps(data, traps)


def _model_steps(data: bytes, traps: Traps) -> Iterator[Step]:
    path = traps.inside / "model.onnx"
    path.write_bytes(_with_folder(data, traps))
    yield "load", lambda: onnxtrain.load(path)
    yield "explain", lambda: onnxtrain.explain(path)
    gradients: list[onnx.ModelProto] = []
    yield "vjp", lambda: gradients.append(onnxtrain.vjp(path, ["x"]))
    built: list[onnxtrain.Artifacts] = []
    yield "build", lambda: built.append(onnxtrain.build(path, loss="mse", optimizer="sgd"))
    lowered: list[object] = []
    yield "lower", lambda: lowered.append(_lower(path))
    if lowered:  # lower() verified that onnxruntime runs the model
        for model in (*gradients, *(b.models["infer"] for b in built)):
            yield COMPARE, lambda model=model: _compare(path, model)


def _with_folder(data: bytes, traps: Traps) -> bytes:
    model = onnx.ModelProto.FromString(data)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = entry.value.replace("@", str(traps.outside))
    return model.SerializeToString()


def _lower(path: Path) -> onnx.ModelProto:
    try:
        return onnxtrain.lower(path, opset=14)
    except VerificationError as error:
        text = str(error)
        if (_DIFFERS in text or _DOES_NOT_RUN in text) and _is_valid(path) and _runs(path):
            raise WrongError(f"lower: {error}") from error
        raise


def _is_valid(path: Path) -> bool:
    """Return whether onnx's checker accepts the model; runtimes accept more."""
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


def _runs(path: Path) -> bool:
    try:
        runtime.create(str(path))
    except OnnxTrainError:
        return False
    return True


def _compare(path: Path, generated: onnx.ModelProto) -> None:
    """Run the model and a generated model, whose first outputs are the model's; compare them."""
    original = onnx.load(path, load_external_data=False)
    feeds = _feeds(original)
    expected = _run(str(path), feeds)
    outputs = {y.name: a for y, a in zip(original.graph.output, expected, strict=True)}
    weights = onnxtrain.load(path).graph.initializers
    cotangents = iter([np.zeros_like(a) for a in expected if np.asarray(a).dtype.kind == "f"])
    for x in generated.graph.input:
        if x.name not in feeds:
            value = _value(weights[x.name]) if x.name in weights else next(cotangents, None)
            if value is None:  # onnxruntime returned another type than the model declares
                return
            feeds[x.name] = value
    names = {x.name for x in generated.graph.input}
    actual = _run(generated.SerializeToString(), {n: a for n, a in feeds.items() if n in names})
    for name, a, b in zip(outputs, expected, actual, strict=False):
        if not isinstance(a, np.ndarray) or a.dtype.kind not in "fiub":
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            raise WrongError(f"{name}: {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}")
        scale = np.max(np.abs(a[np.isfinite(a)]), initial=1.0)
        if np.isfinite(a).all() and not np.allclose(a, b, 1e-3, 1e-4 * scale):
            raise WrongError(f"{name}: {b.ravel()[:4]}, not {a.ravel()[:4]}")
        if (b == SECRET).any():
            raise WrongError(f"{name} contains data from outside the directory")


def _run(model: bytes | str, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return runtime.run(runtime.create(model), None, feeds)


def _value(x: ir.Value) -> np.ndarray:
    assert x.const_value is not None
    return x.const_value.numpy()


def _feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng, weights = np.random.default_rng(0), {t.name for t in model.graph.initializer}
    feeds: dict[str, np.ndarray] = {}
    for x in model.graph.input:
        tensor = x.type.tensor_type
        sizes = [
            d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else _SIZE
            for d in tensor.shape.dim
        ]
        drawn = np.asarray(rng.uniform(0.1, 1.9, sizes))
        if x.name not in weights:
            feeds[x.name] = drawn.astype(ir.DataType(tensor.elem_type).numpy())
    return feeds


_FILES: dict[Path, tuple[onnxtrain.Trainer, bytes, Path]] = {}


def trained(traps: Traps) -> tuple[onnxtrain.Trainer, bytes, Path]:
    """Return a trainer, the bytes of its checkpoint and its directory, cached."""
    if traps.inside not in _FILES:
        loss = [onnxtrain.losses.LossTerm("cross_entropy", output="scores")]
        artifacts = onnxtrain.build(classifier(), loss=loss, optimizer="adamw")
        directory = traps.inside / "artifacts"
        artifacts.save(directory)
        trainer = onnxtrain.Trainer(artifacts)
        trainer.step(**_batch())
        trainer.save(traps.inside / "whole.safetensors")
        data = (traps.inside / "whole.safetensors").read_bytes()
        _FILES[traps.inside] = trainer, data, directory
    return _FILES[traps.inside]


def _batch() -> dict[str, np.ndarray]:
    return {"x": np.ones((4, 6), np.float32), "labels": np.array([0, 1, 2, 0])}


def _checkpoint_steps(seed: int, traps: Traps) -> Iterator[Step]:
    trainer, data, _ = trained(traps)
    path = traps.inside / "damaged.safetensors"
    path.write_bytes(damaged_checkpoint(seed, data))

    def load() -> None:
        before, progress = trainer.state_dict(), trainer.progress()
        try:
            trainer.load(path)
        except OnnxTrainError:
            same = all(np.array_equal(a, before[n]) for n, a in trainer.state_dict().items())
            if not same or trainer.progress() != progress:
                raise WrongError("a rejected checkpoint changed the trainer") from None
            raise
        if not np.isfinite(trainer.step(**_batch()).loss):
            raise WrongError("an accepted checkpoint gives a loss that is not finite")

    yield "load_weights", lambda: trainer.load_weights(path)
    trainer.load(traps.inside / "whole.safetensors")
    yield "load", load


def _directory_steps(seed: int, traps: Traps) -> Iterator[Step]:
    _, _, directory = trained(traps)
    folder = traps.inside / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(directory, folder)
    linked = damage_directory(seed, folder, traps)
    traps.touched()

    def opened(work: Callable[[], object]) -> Callable[[], object]:
        def call() -> None:
            try:
                work()
            finally:
                if linked:  # links are followed, to compare the file with its digest
                    traps.touched()

        return call

    yield "Artifacts.load", opened(lambda: onnxtrain.Artifacts.load(folder))
    yield "Trainer", opened(lambda: onnxtrain.Trainer(folder).step(**_batch()))
