"""Training images for the backbone of the page Teach: shapes, textures, spectra, crops, digits.

A class is one shape with its colors, one texture, one crop of a photo or one digit. Its images
vary in position, rotation, scale, brightness and background. The photos are scikit-learn's
(CC BY 2.0: china.jpg by danielbuechele, flower.jpg by vultilion), and so are the digits (UCI's
optical digits, CC BY 4.0); everything else is generated here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from sklearn.datasets import load_digits, load_sample_image

SIZE = 64
_AXIS = (np.arange(SIZE) + 0.5) / SIZE * 2 - 1
_Y, _X = np.meshgrid(_AXIS, _AXIS, indexing="ij")

Rng = np.random.Generator
Drawing = Callable[[Rng], np.ndarray]
"""Draws an image of a class, [64, 64, 3] with values in 0..1."""


def _plane(rng: Rng, turn: float, zoom: float, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Return coordinates, randomly rotated, scaled and translated; -1..1 is the image."""
    angle = rng.uniform(-turn, turn)
    scale = np.exp(rng.uniform(-zoom, zoom))
    x, y = (_X - rng.uniform(-shift, shift)) * scale, (_Y - rng.uniform(-shift, shift)) * scale
    return x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)


def _sample(image: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the image at coordinates -1..1."""
    rows = np.clip((y + 1) / 2 * image.shape[0], 0, image.shape[0] - 1).astype(int)
    columns = np.clip((x + 1) / 2 * image.shape[1], 0, image.shape[1] - 1).astype(int)
    return image[rows, columns]


def _photos() -> list[np.ndarray]:
    """Return scikit-learn's photos at half their size, 0..1."""
    names = ("china.jpg", "flower.jpg")
    return [load_sample_image(n)[::2, ::2].astype(np.float32) / 255 for n in names]


PHOTOS = _photos()
DIGITS = load_digits()


def background(rng: Rng) -> np.ndarray:
    """Return a random background."""
    if rng.random() < 0.4:
        photo = PHOTOS[rng.integers(2)]
        top, left = (rng.integers(side - 100) for side in photo.shape[:2])
        piece = photo[top : top + 100, left : left + 100]
        return _sample(piece, *_plane(rng, 3.0, 0.3, 0.2))
    a, b = rng.random((2, 3))
    x, _ = _plane(rng, 3.0, 0.0, 0.0)
    share = np.clip(x[..., None] * rng.uniform(0, 0.7) + 0.5, 0, 1)
    return a * share + b * (1 - share)


def shape(rng: Rng) -> Drawing:
    """Return a class: a star, blob, ring or polygon with one or two colors."""
    waves, depth, ring = rng.integers(2, 9), rng.uniform(0.05, 0.5), rng.random() < 0.3
    sharp, stretch = rng.uniform(0.3, 2.0), rng.uniform(0.5, 1.0)
    inner, outer = rng.random((2, 3))
    stripes = rng.uniform(3, 9) if rng.random() < 0.4 else 0.0

    def draw(rng: Rng) -> np.ndarray:
        x, y = _plane(rng, 0.6, 0.35, 0.35)
        y = y / stretch
        angle, radius = np.arctan2(y, x), np.hypot(x, y)
        wave = np.cos(waves * angle)
        edge = 0.65 * (1 - depth + depth * np.sign(wave) * np.abs(wave) ** sharp)
        inside = np.clip((edge - radius) * 20, 0, 1)
        if ring:
            inside = inside * np.clip((radius - edge * 0.55) * 20, 0, 1)
        mix = (np.sin(stripes * 3 * x) > 0) if stripes else (radius < 0.3)
        colors = np.where(mix[..., None], inner, outer)
        return background(rng) * (1 - inside[..., None]) + colors * inside[..., None]

    return draw


def texture(rng: Rng) -> Drawing:
    """Return a class: a texture of superimposed waves in two colors."""
    count = rng.integers(1, 4)
    waves = rng.normal(0, 8, (count, 2))
    bend, sharp = rng.uniform(0, 2), rng.uniform(0.5, 6)
    a, b = rng.random((2, 3))

    def draw(rng: Rng) -> np.ndarray:
        x, y = _plane(rng, 0.25, 0.2, 1.0)
        total = sum(
            np.sin(u * x + v * y + bend * np.sin(2 * x + 3 * y) + rng.uniform(0, 6))
            for u, v in waves
        )
        share = 1 / (1 + np.exp(-sharp * np.asarray(total)))[..., None]
        return a * share + b * (1 - share)

    return draw


def place(rng: Rng) -> Drawing:
    """Return a class: a crop of a photo."""
    photo = PHOTOS[rng.integers(2)]
    top, left = (rng.integers(side - 80) for side in photo.shape[:2])
    piece = photo[top : top + 80, left : left + 80]
    return lambda rng: _sample(piece, *(0.75 * c for c in _plane(rng, 0.3, 0.25, 0.25)))


def sound(rng: Rng) -> Drawing:
    """Return a class: a gray spectrogram of tones, sweeps or bursts."""
    tones = rng.uniform(-0.9, 0.9, rng.integers(1, 5))
    sweep, curvature = rng.normal(0, 0.35), rng.normal(0, 0.3)
    beats, width = rng.uniform(0, 6), rng.uniform(0.02, 0.12)
    hiss = rng.uniform(0, 0.4)

    def draw(rng: Rng) -> np.ndarray:
        x, y = _X - rng.uniform(-0.4, 0.4), _Y - rng.uniform(-0.12, 0.12)
        bent = y - sweep * x - curvature * x * x
        loud = sum(np.exp(-(((bent - t) / width) ** 2)) for t in tones)
        loud = np.asarray(loud) * (np.cos(beats * 2 * x) ** 2 if beats > 1 else 1)
        loud = loud * rng.uniform(0.5, 1) + hiss * rng.random((SIZE, SIZE))
        return np.repeat(np.clip(loud, 0, 1)[..., None], 3, -1)

    return draw


def digit(number: int) -> Drawing:
    """Return a class: handwritten digits, dark on light or light on dark."""
    images = DIGITS.images[DIGITS.target == number] / 16  # pyright: ignore

    def draw(rng: Rng) -> np.ndarray:
        ink = _sample(images[rng.integers(len(images))], *_plane(rng, 0.2, 0.25, 0.2))[..., None]
        return background(rng) * (1 - ink) + rng.random(3) * ink

    return draw


def augment(image: np.ndarray, rng: Rng) -> np.ndarray:
    """Return the image with random brightness, tint and noise, sometimes with random erasing."""
    image = image * rng.uniform(0.7, 1.3) * rng.uniform(0.9, 1.1, 3) + rng.uniform(-0.1, 0.1)
    if rng.random() < 0.3:
        top, left = rng.integers(0, SIZE - 20, 2)
        image[top : top + 20, left : left + 20] = rng.random(3)
    return np.clip(image + rng.normal(0, rng.uniform(0, 0.06), image.shape), 0, 1)


def classes(count: int, seed: int) -> list[Drawing]:
    """Return random classes, half of them shapes."""
    rng = np.random.default_rng(seed)
    kinds = (shape, texture, shape, place, shape, sound)
    return [kinds[i % len(kinds)](rng) for i in range(count)]


def batch(drawings: list[Drawing], rows: int, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """Return images [rows, 3, 64, 64] and class indices."""
    labels = rng.integers(0, len(drawings), rows)
    images = [augment(np.array(drawings[k](rng), float), rng) for k in labels]
    return np.stack(images).transpose(0, 3, 1, 2).astype(np.float32), labels
