"""Pictures: files, scikit-learn's samples, a style that is drawn here, and patches of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image

SAMPLES = ("china", "flower")
"""scikit-learn's pictures, both CC BY 2.0: china.jpg by danielbuechele, flower.jpg by vultilion."""


def mosaic(size: int = 256, seed: int = 0) -> np.ndarray:
    """Draw coloured tiles with dark joints, [size, size, 3] of 0..255; ours, free to use.

    It may be repeated in every direction: tiles that end at one side go on at the other.
    """
    rng = np.random.default_rng(seed)
    cells = 14
    grid = np.stack(np.meshgrid(np.arange(cells), np.arange(cells), indexing="ij"), -1)
    points = (grid + rng.uniform(0.1, 0.9, grid.shape)).reshape(-1, 2) * (size / cells)
    palette = np.array(
        [
            [222, 84, 45],
            [243, 178, 53],
            [34, 102, 141],
            [20, 50, 92],
            [142, 36, 62],
            [236, 226, 198],
            [64, 145, 128],
        ],
        float,
    )
    colours = palette[rng.integers(0, len(palette), len(points))] + rng.normal(
        0, 10, (len(points), 3)
    )
    at = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), -1)[:, :, None]
    apart = np.abs(at - points)
    distance = np.sqrt((np.minimum(apart, size - apart) ** 2).sum(-1))
    nearest = np.argsort(distance, axis=-1)[..., :2]
    near, second = np.take_along_axis(distance, nearest, -1).transpose(2, 0, 1)
    picture = colours[nearest[..., 0]] * (1.1 - 0.02 * near[..., None])
    joint = np.clip((second - near) / 3.0, 0.0, 1.0)[..., None]
    return np.clip(picture * joint + 22 * (1 - joint), 0, 255).astype(np.float32)


def load(name: str | Path, size: int | None = None) -> np.ndarray:
    """Return a picture as [H, W, 3] float32 of 0..255: ``china``, ``flower``, ``mosaic`` or a file.

    With a size the shorter side becomes that long.
    """
    if str(name) == "mosaic":
        picture = Image.fromarray(mosaic().astype(np.uint8))
    elif str(name) in SAMPLES:
        picture = Image.fromarray(load_sample_image(f"{name}.jpg"))
    else:
        picture = Image.open(name).convert("RGB")
    if size is not None:
        factor = size / min(picture.size)
        wanted = [max(round(side * factor), size) for side in picture.size]
        picture = picture.resize((wanted[0], wanted[1]), Image.Resampling.BOX)
    return np.asarray(picture, np.float32)


def load_all(source: str | Path, size: int) -> list[np.ndarray]:
    """Return the pictures of a folder, or scikit-learn's for ``samples``, at a shorter side."""
    if str(source) == "samples":
        return [load(name, size) for name in SAMPLES]
    names = {".jpg", ".jpeg", ".png"}
    files = sorted(f for f in Path(source).iterdir() if f.suffix.lower() in names)
    if not files:
        raise FileNotFoundError(f"no .jpg or .png pictures in {source}")
    return [load(f, size) for f in files]


def middle(picture: np.ndarray, size: int) -> np.ndarray:
    """Cut a square out of the middle."""
    top, left = ((side - size) // 2 for side in picture.shape[:2])
    return picture[top : top + size, left : left + size]


def crops(
    pictures: list[np.ndarray], size: int, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Cut squares out at random, every other one mirrored: [count, 3, size, size]."""
    squares = []
    for _ in range(count):
        picture = pictures[rng.integers(len(pictures))]
        top, left = (rng.integers(side - size + 1) for side in picture.shape[:2])
        square = picture[top : top + size, left : left + size]
        squares.append(square[:, ::-1] if rng.random() < 0.5 else square)
    return planes(np.stack(squares))


def planes(pictures: np.ndarray) -> np.ndarray:
    """[..., H, W, 3] -> [..., 3, H, W]."""
    return np.ascontiguousarray(np.moveaxis(pictures, -1, -3), np.float32)


def save(path: str | Path, image: np.ndarray) -> None:
    """Write [1, 3, H, W] or [3, H, W] of about 0..255."""
    pixels = np.moveaxis(image.reshape(image.shape[-3:]), 0, -1)
    Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8)).save(path)
