"""Load images from files and scikit-learn, generate a style image, and crop them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image

SAMPLES = ("china", "flower")
"""scikit-learn's images, both CC BY 2.0: china.jpg by danielbuechele, flower.jpg by vultilion."""


def mosaic(size: int = 256, seed: int = 0) -> np.ndarray:
    """Return a mosaic of colored tiles with dark joints, [size, size, 3] in 0..255.

    It tiles seamlessly: it can be repeated in both directions.
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
    colors = palette[rng.integers(0, len(palette), len(points))] + rng.normal(
        0, 10, (len(points), 3)
    )
    at = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), -1)[:, :, None]
    apart = np.abs(at - points)
    distance = np.sqrt((np.minimum(apart, size - apart) ** 2).sum(-1))
    nearest = np.argsort(distance, axis=-1)[..., :2]
    near, second = np.take_along_axis(distance, nearest, -1).transpose(2, 0, 1)
    image = colors[nearest[..., 0]] * (1.1 - 0.02 * near[..., None])
    joint = np.clip((second - near) / 3.0, 0.0, 1.0)[..., None]
    return np.clip(image * joint + 22 * (1 - joint), 0, 255).astype(np.float32)


def load(name: str | Path, size: int | None = None) -> np.ndarray:
    """Return an image as [H, W, 3] float32 in 0..255: ``china``, ``flower``, ``mosaic`` or a file.

    With ``size``, the image is scaled to that length of its shorter side.
    """
    if str(name) == "mosaic":
        image = Image.fromarray(mosaic().astype(np.uint8))
    elif str(name) in SAMPLES:
        image = Image.fromarray(load_sample_image(f"{name}.jpg"))
    else:
        image = Image.open(name).convert("RGB")
    if size is not None:
        factor = size / min(image.size)
        resized = [max(round(side * factor), size) for side in image.size]
        image = image.resize((resized[0], resized[1]), Image.Resampling.BOX)
    return np.asarray(image, np.float32)


def load_all(source: str | Path, size: int) -> list[np.ndarray]:
    """Return the images of a directory, or scikit-learn's for ``samples``; see ``load``."""
    if str(source) == "samples":
        return [load(name, size) for name in SAMPLES]
    names = {".jpg", ".jpeg", ".png"}
    files = sorted(f for f in Path(source).iterdir() if f.suffix.lower() in names)
    if not files:
        raise FileNotFoundError(f"no .jpg or .png images in {source}")
    return [load(f, size) for f in files]


def center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """Return the central square."""
    top, left = ((side - size) // 2 for side in image.shape[:2])
    return image[top : top + size, left : left + size]


def crops(images: list[np.ndarray], size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return random square crops, flipped with probability 1/2: [count, 3, size, size]."""
    squares = []
    for _ in range(count):
        image = images[rng.integers(len(images))]
        top, left = (rng.integers(side - size + 1) for side in image.shape[:2])
        square = image[top : top + size, left : left + size]
        squares.append(square[:, ::-1] if rng.random() < 0.5 else square)
    return planes(np.stack(squares))


def planes(images: np.ndarray) -> np.ndarray:
    """[..., H, W, 3] -> [..., 3, H, W]."""
    return np.ascontiguousarray(np.moveaxis(images, -1, -3), np.float32)


def save(path: str | Path, image: np.ndarray) -> None:
    """Write an image [1, 3, H, W] or [3, H, W] with values in 0..255."""
    pixels = np.moveaxis(image.reshape(image.shape[-3:]), 0, -1)
    Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8)).save(path)
