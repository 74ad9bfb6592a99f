"""The base class of losses, penalties and learning rates."""

from __future__ import annotations

import inspect
from typing import Any

from onnxtrain.compat.onnxcustom.utils.onnx_helper import save_onnx_graph


class Part:
    """An object with settings that can be compared, printed, pickled and saved."""

    def get_params(self, deep: bool = False) -> dict[str, Any]:
        """Return the settings."""
        del deep
        names = inspect.signature(type(self).__init__).parameters
        return {n: getattr(self, n) for n in names if n != "self" and hasattr(self, n)}

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in self.get_params().items())
        return f"{type(self).__name__}({settings})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __getstate__(self) -> dict[str, Any]:
        """Omit sessions and graphs, which are rebuilt."""
        return {k: v for k, v in vars(self).items() if k != "_sessions" and not k.endswith("_")}

    def save_onnx_graph(
        self, folder: Any, prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, Any]:
        """Write the graphs of this part."""
        return save_onnx_graph(self, folder, prefix, suffix)
