"""Pass damaged PEFT adapters to `load_adapter`."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import onnxtrain
from onnxtrain.adapters import Adapted
from tests.adapters.decoders import write
from tests.hostile.mutate_files import change, damage_bytes, replace_file
from tests.hostile.run import Step, WrongError
from tests.hostile.traps import Traps

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_BASE: dict[Path, tuple[Path, Path]] = {}


def steps_of_case(seed: int, traps: Traps) -> tuple[str, Iterator[Step]]:
    """Return the name of a case, the file that is damaged, and the entry points to call."""
    rng = random.Random(seed)
    model, adapter = _base(traps)
    folder = traps.inside / "adapter"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(adapter, folder)
    name = rng.choice((CONFIG, CONFIG, TENSORS))
    linked = _damage(rng, folder / name, traps)
    traps.touched()
    return name, _steps(model, folder, traps, linked=linked)


def _base(traps: Traps) -> tuple[Path, Path]:
    if traps.inside not in _BASE:
        model = write(traps.inside / "decoder").path
        folder = traps.inside / "peft"
        onnxtrain.lora(model, 2, targets="all-linear").export_peft(folder)
        _BASE[traps.inside] = model, folder
    return _BASE[traps.inside]


def _damage(rng: random.Random, path: Path, traps: Traps) -> bool:
    """Damage a file; return whether it may be a link now."""
    match rng.randrange(5):
        case 0:
            replace_file(rng, path, traps)
            return True
        case 1:
            damage_bytes(rng, path)
        case 2 if path.name == TENSORS:
            _fill(rng, path)
        case _:
            _change_json(rng, path)
    return False


def _change_json(rng: random.Random, path: Path) -> None:
    data, rest = path.read_bytes(), b""
    if path.name == TENSORS:
        size = int.from_bytes(data[:8], "little")
        data, rest = data[8 : 8 + size], data[8 + size :]
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 2))):
        change(rng, tree)
    text = json.dumps(tree).encode()
    head = len(text).to_bytes(8, "little") if rest else b""
    path.write_bytes(head + text + rest)


def _fill(rng: random.Random, path: Path) -> None:
    """Replace some values of the factors."""
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    value = np.float32(rng.choice((np.nan, np.inf, 3e38, 1e-45, 0.0))).tobytes()
    at = 8 + size + 4 * rng.randrange((len(data) - 8 - size) // 4)
    data[at : at + 4] = value
    path.write_bytes(data)


def _steps(model: Path, folder: Path, traps: Traps, *, linked: bool) -> Iterator[Step]:
    loaded: list[Adapted] = []

    def load() -> None:
        try:
            loaded.append(onnxtrain.load_adapter(model, folder))
        finally:
            if linked:  # the caller names these files
                traps.touched()

    yield "load_adapter", load
    for adapted in loaded:
        yield "check", lambda adapted=adapted: _check(adapted)
        yield "merge", adapted.merge
        yield "export_peft", lambda adapted=adapted: adapted.export_peft(traps.inside / "again")


def _check(adapted: Adapted) -> None:
    finite = all(np.isfinite(a).all() for a in adapted.parameters.values())
    scalings = [a.scaling for a in adapted.adapters]
    if not finite or not 0 <= adapted.dropout < 1 or not all(map(math.isfinite, scalings)):
        raise WrongError(f"accepted {finite=}, dropout {adapted.dropout}, scalings {scalings[:3]}")
