"""The base class of losses, penalties and learning rates."""

from __future__ import annotations

import inspect
from typing import Any

from onnxtrain.compat.onnxcustom.utils.onnx_helper import save_onnx_graph


class Part:
    """An object with settings that can be compared, printed, pickled, copied and saved.

    It has no ``get_params``: scikit-learn's ``clone`` copies objects without it.
    """

    def _settings(self) -> str:
        names = [n for n in inspect.signature(type(self).__init__).parameters if n != "self"]
        return ", ".join(f"{n}={getattr(self, n)!r}" for n in names if hasattr(self, n))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings()})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._settings() == other._settings()  # pyright: ignore[reportAttributeAccessIssue]

    def __hash__(self) -> int:
        return hash((type(self), self._settings()))

    def __getstate__(self) -> dict[str, Any]:
        """Omit sessions and graphs, which are rebuilt."""
        return {k: v for k, v in vars(self).items() if k != "_sessions" and not k.endswith("_")}

    def save_onnx_graph(
        self, folder: Any, prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, Any]:
        """Write the graphs of this part."""
        return save_onnx_graph(self, folder, prefix, suffix)
