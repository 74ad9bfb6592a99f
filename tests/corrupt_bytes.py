"""Random corruption of a file's bytes, drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

KINDS = ("flip", "set", "cut", "repeat")


def damage(draw: st.DrawFn, data: bytearray, kind: str) -> None:
    """Change some bytes of ``data`` in place, which must not be empty."""
    at = draw(st.integers(0, len(data) - 1))
    match kind:
        case "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        case "set":
            data[at] = draw(st.integers(0, 255))
        case "cut":
            del data[at : at + draw(st.integers(1, 40))]
        case "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 40))]
        case "insert":
            data[at:at] = draw(st.binary(max_size=8))
        case _:
            raise ValueError(f"no such damage: {kind}")
