"""What `load` is willing to open, and how it says no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from onnxtrain.errors import LoadError

INVALID = "the model is not valid ONNX; export it again, or mend it with onnx_ir"
"""The way out for most problems."""

_SHOWN = 5
_CLIP = 80


@dataclass(frozen=True)
class Limits:
    """The sizes above which a file is refused; raise one only for a file you trust.

    Attributes:
        file_bytes: size of the model file and of each external data file. A model file is also
            bound by protobuf's own 2 GiB.
        nodes: nodes in all graphs and local functions together, also once those are inlined.
        depth: nesting of subgraphs, of function calls and of sequence types. Protobuf parsers give
            up at 33 nested subgraphs, so a larger value only matters for models made in memory.
        rank: number of dimensions of a tensor or of a declared shape.
        elements: number of elements of one tensor.
        name_length: characters of a name of a value, node, operator, attribute or dimension.
    """

    file_bytes: int = 64 << 30
    nodes: int = 2_000_000
    depth: int = 32
    rank: int = 32
    elements: int = 1 << 40
    name_length: int = 4096


class Kind(NamedTuple):
    """A kind of problem: the first line of its message and the way out."""

    headline: str
    hint: str = ""


def quote(name: object) -> str:
    """``name`` in quotes, escaped, and clipped so that a hostile name cannot flood a message."""
    text = name if isinstance(name, str) else repr(name)
    return repr(text if len(text) <= _CLIP else text[:_CLIP] + "...")


class Problems:
    """Collects what is wrong with one source, so that all of a kind are reported at once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._found: dict[Kind, list[str]] = {}
        self._count: dict[Kind, int] = {}

    def add(self, kind: Kind, detail: str) -> None:
        """Note one problem; `check` raises it."""
        details = self._found.setdefault(kind, [])
        self._count[kind] = self._count.get(kind, 0) + 1
        if len(details) < _SHOWN:
            details.append(detail)

    def refusal(self, kind: Kind, *details: str) -> LoadError:
        """The error for a problem that ends the reading at once."""
        return self._error(kind, list(details), len(details))

    def check(self) -> None:
        """Raise the first kind of problem found, if there is one."""
        for kind, details in self._found.items():
            raise self._error(kind, details, self._count[kind])

    def _error(self, kind: Kind, details: list[str], count: int) -> LoadError:
        lines = [f"{self.source}: {kind.headline}"]
        lines += [f"  {detail}" for detail in details]
        if count > len(details):
            lines.append(f"  and {count - len(details)} more")
        if kind.hint:
            lines.append(f"hint: {kind.hint}")
        return LoadError("\n".join(lines))
