"""Pass damaged tables, archives, images and texts to the readers of training data."""

from __future__ import annotations

import io
import json
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from onnxtrain.manifest import TensorSpec
from onnxtrain.text import read_records
from onnxtrain.training.data_files import read_images
from tests.hostile.entry_points import trained
from tests.hostile.mutate_files import VALUES, damage_bytes, replace_file
from tests.hostile.run import Step, WrongError
from tests.hostile.traps import Traps

IMAGE = TensorSpec("image", "float32", ("batch", 3, 4, 4), "input")
LABELS = TensorSpec("labels", "int64", ("batch",), "target")
_CELLS = (
    *(
        "",
        " ",
        "1",
        "-1",
        "2.5",
        "nan",
        "inf",
        "1e400",
        "1e19",
        str(2**63),
        "0x10",
        "1_0",
        "²",
        "٣",
    ),
    *('"', '""', '"a\nb"', "\0", "\r", "\n", "a,b", "\t", "\ufeff", "\u2028", "\ud7ff", "é" * 99),
    *("9" * 5000, "x" * 200_000, "[1, 2]", "{}", "null", "true", "../secret.bin", "/dev/zero"),
)
_PATHS = (
    *("a.png", "../outside/secret.bin", "link.bin", "linked/secret.bin", "/dev/zero", "pipe"),
    *("folder", "", "..", "a.png\0", "missing.png", "bad.png"),
)


def steps_of_case(seed: int, traps: Traps) -> tuple[str, Iterator[Step]]:
    """Return the name of a case and the readers to call."""
    rng = random.Random(seed)
    folder = traps.inside / "data"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    name = rng.choice(sorted(_KINDS))
    return name, _KINDS[name](rng, folder, traps)


def _evaluation(traps: Traps) -> Callable[[Path], object]:
    """Return the evaluation of a classifier of six features on a file."""
    trainer = trained(traps)[0]
    return lambda path: trainer.evaluate(path, batch_size=4)


def _records(path: Path) -> None:
    for record in read_records(path).records:
        texts = [v for n, v in record.fields.items() if n not in ("label", "messages")]
        for text in texts:
            text.encode()
            if not text.strip():
                raise WrongError(f"line {record.line} is an empty text")


def _finish(rng: random.Random, path: Path, traps: Traps) -> None:
    """Damage a file, or replace it by something else."""
    if rng.random() < 0.3:
        damage_bytes(rng, path)
    if rng.random() < 0.1:
        replace_file(rng, path, traps)
        traps.touched()


def _followed(traps: Traps, path: Path, work: Callable[[Path], object]) -> Callable[[], object]:
    """Return a call of a reader; a link at the path itself is the caller's own."""

    def call() -> None:
        linked = path.is_symlink()
        try:
            work(path)
        finally:
            if linked:
                traps.touched()

    return call


def _table(rng: random.Random, folder: Path, traps: Traps) -> Iterator[Step]:
    suffix = rng.choice((".csv", ".tsv"))
    path, comma = folder / f"a{suffix}", "," if suffix == ".csv" else "\t"
    width = rng.choice((7, 7, 7, 7, 6, 8, 3000))
    names = [f"c{i}" for i in range(width - 1)] + [rng.choice(("labels", "label", "text", "c0"))]
    lines = [comma.join(names)]
    lines += [
        comma.join(["0.5"] * (width - 1) + [str(i % 3)]) for i in range(rng.choice((0, 1, 6)))
    ]
    for _ in range(rng.choice((0, 1, 2))):
        row = rng.randrange(len(lines))
        cells = lines[row].split(comma)
        cells[rng.randrange(len(cells))] = rng.choice(_CELLS)
        lines[row] = comma.join(cells)
    path.write_bytes("\n".join(lines).encode())
    _finish(rng, path, traps)
    yield "evaluate", _followed(traps, path, _evaluation(traps))
    yield "read_records", _followed(traps, path, _records)


def _lines(rng: random.Random, folder: Path, traps: Traps) -> Iterator[Step]:
    path = folder / rng.choice(("a.jsonl", "a.ndjson", "a.json", "a.txt"))
    row = rng.choice(
        (
            {"x": [1, 2, 3, 4, 5, 6], "labels": 0},
            {"text": "hello", "label": "a"},
            {"prompt": "hello", "completion": "you"},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        )
    )
    rows = [json.loads(json.dumps(row)) for _ in range(4)]
    for _ in range(rng.choice((0, 1, 1, 2))):
        one = rng.choice(rows)
        if one:
            one[rng.choice(sorted(one))] = rng.choice(VALUES)
    texts = [json.dumps(r) for r in rows]
    if rng.random() < 0.2:
        texts[rng.randrange(4)] = rng.choice(("[" * 99_999, "9" * 9999, '"\\ud800"', "{", "null"))
    text = f"[{','.join(texts)}]" if path.suffix == ".json" else "\n".join(texts)
    path.write_bytes(text.encode())
    _finish(rng, path, traps)
    yield "evaluate", _followed(traps, path, _evaluation(traps))
    yield "read_records", _followed(traps, path, _records)


def _archive(rng: random.Random, folder: Path, traps: Traps) -> Iterator[Step]:
    path = folder / "a.npz"
    arrays: dict[str, np.ndarray] = {"x": np.ones((4, 6), np.float32), "labels": np.arange(4)}
    other = rng.choice(
        (
            np.array([1e300] * 4),
            np.array([2**63] * 4, np.uint64),
            np.array(["a", "b", "\0", "²"]),
            np.array([None, 1, "x", []], object),
            np.zeros((4, 0)),
            np.array(3),
            np.zeros(1 << 22, np.int8),
            np.array([np.nan, np.inf, 0, 1]),
            np.zeros(4, [("a", "i4")]),
            np.array(["2020-01-01"] * 4, "datetime64[D]"),
        )
    )
    arrays[rng.choice(("x", "labels", "y", "../x"))] = other
    save = rng.choice((np.savez, np.savez_compressed))
    save(path, **arrays)  # type: ignore[arg-type]
    if rng.random() < 0.3:
        header = f"{{'descr': '{rng.choice(('<f4', '|O', '<U9', 'x'))}', 'fortran_order': False, "
        header += f"'shape': ({rng.choice((3, -1, 2**62, 10**30))}, 2)}}\n"
        data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("z.npy", data)
    _finish(rng, path, traps)
    yield "evaluate", _followed(traps, path, _evaluation(traps))


def _picture(rng: random.Random) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    mode = rng.choice(("RGB", "L", "RGBA", "P", "1", "I;16"))
    Image.new(mode, (rng.choice((4, 1, 9)), 4)).save(file, rng.choice(("PNG", "PNG", "TIFF")))
    data = bytearray(file.getvalue())
    if rng.random() < 0.5:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))])


def _images(rng: random.Random, folder: Path, traps: Traps) -> Iterator[Step]:
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for i in range(2):
            (folder / name / f"{i}.png").write_bytes(_picture(rng))
    target = folder / rng.choice(("cat", "dog", "cat/0.png", "bird"))
    if rng.random() < 0.4:
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.write_bytes(b"")
        replace_file(rng, target, traps)
        traps.touched()
    skipped = rng.choice((None, list[str]()))
    yield "read_images", lambda: read_images(folder, (IMAGE, LABELS), {}, skipped)


def _image_table(rng: random.Random, folder: Path, traps: Traps) -> Iterator[Step]:
    root = traps.inside
    for name in ("a.png", "bad.png"):
        (root / name).write_bytes(_picture(rng))
    rows = [(rng.choice(_PATHS), rng.choice(("cat", "dog", "²", "", "9" * 5000))) for _ in range(3)]
    path = root / "table.csv"
    header = rng.choice(("image,label", "path,class", "image,image", "image"))
    path.write_bytes("\n".join([header, *(",".join(r) for r in rows)]).encode())
    skipped = rng.choice((None, list[str]()))
    yield "read_images", lambda: read_images(path, (IMAGE, LABELS), {}, skipped)


_KINDS: dict[str, Callable[[random.Random, Path, Traps], Iterator[Step]]] = {
    "table": _table,
    "lines": _lines,
    "archive": _archive,
    "images": _images,
    "image table": _image_table,
}
