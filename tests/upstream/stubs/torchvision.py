"""The part of torchvision that downloads MNIST; the harness writes the files itself."""

from types import SimpleNamespace


def _dataset(folder: str, *, download: bool) -> None:
    del folder, download


datasets = SimpleNamespace(MNIST=_dataset)
