"""A model that came out of torch: any other model, with ways to write it down."""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir

from onnxtrain.graph.io import save
from onnxtrain.graph.io.strip import strip_traces


class ExportedModel(ir.Model):
    """What :func:`onnxtrain.torch.from_torch` returns: an ``onnx_ir.Model`` that can be saved."""

    __slots__ = ()

    @property
    def proto(self) -> onnx.ModelProto:
        """The model as ``onnx.save`` and ``onnx.checker`` take it, a new copy each time."""
        return ir.to_proto(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an .onnx file, whole or not at all; beyond 2 GB weights go to ``<path>.data``.

        Raises:
            SaveError: if the file system refuses.
        """
        save(self, path)


def as_exported(model: ir.Model) -> ExportedModel:
    """Return the same model with ways to write it down, and without paths of this machine."""
    strip_traces(model)
    # Not a copy: it has no fields of its own, and versions of onnx_ir differ in what a copy takes.
    model.__class__ = ExportedModel
    assert isinstance(model, ExportedModel)
    return model


__all__ = ["ExportedModel", "as_exported"]
