"""Weights too large for a protobuf: in one file, to which all models of a run refer.

A model that came with external data has such a file already, mapped into memory; its own tensors
are then referred to where they lie, and nothing is copied. Otherwise the tensors are written once,
to a file that goes when nobody needs it any more.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

import onnx_ir as ir

from onnxtrain.graph.io.external_data import STORED, Stored
from onnxtrain.graph.io.imports import file_opset, note_file_opset

LARGE = 1 << 29
"""Bytes of weights from which on they are kept out of protobufs."""
FILE = "weights.bin"
_SMALLEST = 1024  # bytes; what is smaller stays in the protobuf
_ALIGNMENT = 4096
_META = "onnxtrain.shared_weights"  # key in Model.meta


class SharedWeights:
    """A file of weights, and what lies where in it."""

    def __init__(self) -> None:
        self.path: Path | None = None
        """Of the file, once there is one."""
        self._own = False
        self._places: dict[int, tuple[int, object]] = {}

    def take(self, model: ir.Model) -> bool:
        """Look after the weights of a model, if they are large; say whether they are."""
        tensors = [t for x in model.graph.initializers.values() if (t := x.const_value) is not None]
        if sum(t.nbytes for t in tensors) <= LARGE:
            return False
        self.keep(model)
        if self.path is None:
            places = {id(t): _stored(t) for t in tensors if t.nbytes >= _SMALLEST}
            files = {place.file for place in places.values() if place is not None}
            # What lies in no file, such as adapters beside a large model, stays in the protobuf.
            loose = sum(t.nbytes for t in tensors if places.get(id(t)) is None)
            (only,) = files if len(files) == 1 and loose <= LARGE else (None,)
            if only is None:
                self._make_file()
            else:
                self.path = Path(only)
        return True

    def keep(self, model: ir.Model) -> None:
        """Let :func:`detach` know that weights of this model belong here."""
        model.meta[_META] = self

    def detach(self, model: ir.Model) -> None:
        """Replace the larger weights of a model by references to the file, in place."""
        for name, x in model.graph.initializers.items():
            tensor = x.const_value
            if tensor is None or isinstance(tensor, ir.ExternalTensor):
                continue
            if tensor.nbytes < _SMALLEST or tensor.dtype == ir.DataType.STRING:
                continue
            offset = self._offset(tensor)
            if offset is None:
                continue
            assert self.path is not None
            x.const_value = ir.ExternalTensor(
                self.path.name,
                offset,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
                base_dir=str(self.path.parent),
            )

    def _offset(self, tensor: ir.TensorProtocol) -> int | None:
        """Return where a tensor lies in the file; one that is not there is added if it can be."""
        if not self._own:
            place = _stored(tensor)
            return None if place is None or Path(place.file) != self.path else place.offset
        data = getattr(tensor, "raw", tensor)
        key = id(data)
        if key not in self._places:
            assert self.path is not None
            with self.path.open("ab") as file:
                file.write(bytes(-file.tell() % _ALIGNMENT))
                offset = file.tell()
                file.write(tensor.tobytes())
            self._places[key] = offset, data  # kept, so that its number is not used again
        return self._places[key][0]

    def _make_file(self) -> None:
        folder = tempfile.mkdtemp(prefix="onnxtrain-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = Path(folder) / FILE
        self._own = True


def copy_with_weights(model: ir.Model) -> ir.Model:
    """Return a copy of a model whose weights are looked after by the same file."""
    copy = model.clone()
    note_file_opset(copy, file_opset(model))
    keep_with(copy, model)
    return copy


def keep_with(model: ir.Model, other: ir.Model) -> None:
    """Let one model's weights be looked after as those of another."""
    if _META in other.meta:
        model.meta[_META] = other.meta[_META]


def detach(model: ir.Model) -> bool:
    """Replace larger weights by references, if the model's are kept in a file; say whether so."""
    shared: SharedWeights | None = model.meta.get(_META)
    if shared is not None:
        shared.detach(model)
    return shared is not None


def _stored(tensor: ir.TensorProtocol) -> Stored | None:
    return tensor.meta.get(STORED)
