"""Cases for shapes, axes, concatenation, splitting and tiling."""

from __future__ import annotations

import torch

from tests.cases.base import OpCase, const, f, ints


def depth_to_space(x: torch.Tensor, b: int, mode: str) -> torch.Tensor:
    n, c, h, w = x.shape
    if mode == "DCR":
        blocks = x.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape(n, c // b**2, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return blocks.reshape(n, c // b**2, h * b, w * b)


def space_to_depth(x: torch.Tensor, b: int) -> torch.Tensor:
    n, c, h, w = x.shape
    blocks = x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
    return blocks.reshape(n, c * b**2, h // b, w // b)


def reverse_sequence(x: torch.Tensor, lengths: torch.Tensor, time: int) -> torch.Tensor:
    """Reverse the first ``lengths[b]`` steps; ``time`` is 0 or 1, the batch is the other axis."""
    x = x if time == 1 else x.transpose(0, 1)
    rows = [torch.cat([r[:n].flip(0), r[n:]]) for r, n in zip(x, lengths.tolist(), strict=True)]
    y = torch.stack(rows)
    return y if time == 1 else y.transpose(0, 1)


CASES = [
    OpCase("Reshape", (f(2, 6), const([3, 4])), torch=torch.reshape),
    OpCase(
        "Reshape",
        (f(2, 3, 4), const([0, -1, 2])),
        torch=lambda x, s: x.reshape(2, 6, 2),
        id="zero-and-minus-one",
    ),
    OpCase("Reshape", (f(1, 1), const([])), torch=lambda x, s: x.reshape(()), id="to-scalar"),
    OpCase("Reshape", (f(6), ints([2, 3])), torch=lambda x, s: x.reshape(2, 3), id="runtime"),
    OpCase("Flatten", (f(2, 3, 4),), torch=lambda x: x.flatten(1)),
    OpCase("Flatten", (f(2, 3, 4),), {"axis": -1}, torch=lambda x: x.reshape(6, 4), id="negative"),
    OpCase("Flatten", (f(2, 3),), {"axis": 0}, torch=lambda x: x.reshape(1, 6), id="axis-0"),
    OpCase("Squeeze", (f(2, 1, 3), const([1])), torch=lambda x, a: x.squeeze(1)),
    OpCase("Squeeze", (f(1, 2, 1),), torch=torch.squeeze, id="all", dynamic="none: rank unknown"),
    OpCase(
        "Squeeze", (f(2, 1, 1), const([-1, -2])), torch=lambda x, a: x.reshape(2), id="negative"
    ),
    OpCase("Unsqueeze", (f(2, 3), const([1])), torch=lambda x, a: x[:, None]),
    OpCase("Unsqueeze", (f(), const([0, -1])), torch=lambda x, a: x.reshape(1, 1), id="scalar"),
    OpCase("Transpose", (f(2, 3, 4),), {"perm": [2, 0, 1]}, torch=lambda x: x.permute(2, 0, 1)),
    OpCase("Transpose", (f(2, 3, 4),), torch=lambda x: x.permute(2, 1, 0), id="no-perm"),
    OpCase("Transpose", (f(),), torch=lambda x: x, id="scalar"),
    OpCase("Identity", (f(2, 3),), torch=lambda x: x),
    OpCase("Identity", (f(),), torch=lambda x: x, id="scalar"),
    OpCase("Expand", (f(3, 1), const([2, 3, 4])), torch=lambda x, s: x.expand(2, 3, 4)),
    OpCase("Expand", (f(3, 4), const([1, 1])), torch=lambda x, s: x, id="smaller-shape"),
    OpCase("Expand", (f(1, 4), ints([3, 4])), torch=lambda x, s: x.expand(3, 4), id="runtime"),
    OpCase("Expand", (f(), const([2])), torch=lambda x, s: x.expand(2), id="scalar"),
    OpCase("Tile", (f(2, 3), const([2, 1])), torch=torch.tile),
    OpCase("Tile", (f(2, 1, 3), const([1, 4, 2])), torch=torch.tile, id="several"),
    OpCase("Tile", (f(2, 3), ints([3, 2])), torch=lambda x, r: x.tile(3, 2), id="runtime"),
    OpCase("Tile", (f(2, 3), const([0, 2])), torch=lambda x, r: x.tile(0, 2), id="empty"),
    OpCase("Concat", (f(2, 3), f(2, 1), f(2, 2)), {"axis": 1}, torch=lambda *x: torch.cat(x, 1)),
    OpCase(
        "Concat", (f(2, 3), f(4, 3)), {"axis": -2}, torch=lambda *x: torch.cat(x), id="negative"
    ),
    OpCase("Concat", (f(2, 3),), {"axis": 0}, torch=lambda x: x, id="single"),
    OpCase(
        "Split", (f(2, 6), const([2, 4])), {"axis": 1}, torch=lambda x, s: x.split(s, 1), outputs=2
    ),
    OpCase(
        "Split",
        (f(7, 2),),
        {"num_outputs": 3},
        torch=lambda x: x.split([3, 3, 1]),
        outputs=3,
        id="uneven",
    ),
    OpCase(
        "Split",
        (f(2, 6),),
        {"num_outputs": 3, "axis": -1},
        torch=lambda x: x.split(2, 1)[1],
        outputs=["_a", "y", "_c"],
        id="unused-outputs",
    ),
    OpCase(
        "Split",
        (f(2, 6), ints([1, 3, 2])),
        {"axis": 1},
        torch=lambda x, s: (x[:, :1], x[:, 4:]),
        outputs=["a", "_b", "c"],
        id="runtime-sizes",
    ),
    OpCase("Split", (f(4),), {"num_outputs": 1}, torch=lambda x: x, id="one-part"),
    OpCase("Trilu", (f(3, 4),), torch=torch.triu),
    OpCase(
        "Trilu", (f(2, 3, 4), const(-1)), {"upper": 0}, torch=lambda x, k: x.tril(-1), id="lower-k"
    ),
    OpCase("Trilu", (f(3, 3), ints(1)), torch=lambda x, k: x.triu(1), id="runtime-k"),
    OpCase(
        "DepthToSpace",
        (f(2, 8, 2, 3),),
        {"blocksize": 2},
        torch=lambda x: depth_to_space(x, 2, "DCR"),
    ),
    OpCase(
        "DepthToSpace",
        (f(2, 8, 2, 3),),
        {"blocksize": 2, "mode": "CRD"},
        torch=lambda x: depth_to_space(x, 2, "CRD"),
        id="crd",
    ),
    OpCase(
        "SpaceToDepth", (f(2, 3, 4, 6),), {"blocksize": 2}, torch=lambda x: space_to_depth(x, 2)
    ),
    OpCase(
        "SpaceToDepth",
        (f(1, 1, 3, 6),),
        {"blocksize": 3},
        torch=lambda x: space_to_depth(x, 3),
        id="three",
    ),
    OpCase(
        "ReverseSequence",
        (f(4, 3, 2), ints([1, 4, 2])),
        torch=lambda x, n: reverse_sequence(x, n, 0),
    ),
    OpCase(
        "ReverseSequence",
        (f(3, 4), ints([4, 1, 3])),
        {"batch_axis": 0, "time_axis": 1},
        torch=lambda x, n: reverse_sequence(x, n, 1),
        id="batch-first",
    ),
    OpCase(
        "CenterCropPad",
        (f(5, 3), const([2, 6])),
        torch=lambda x, s: torch.nn.functional.pad(x[1:3], (1, 2)),
    ),
    OpCase(
        "CenterCropPad",
        (f(2, 5, 4), const([3, 7])),
        {"axes": [-1, 1]},
        torch=lambda x, s: torch.nn.functional.pad(x[..., 0:3], (0, 0, 1, 1)),
        id="axes",
    ),
]
