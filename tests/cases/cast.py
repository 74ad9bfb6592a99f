"""Cases for changes of dtype."""

from __future__ import annotations

import onnx

from tests.cases.base import OpCase, f, fixed

FLOAT, DOUBLE, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.INT64

THROUGH_INTEGERS = """
g (float[2, 3] x) => (float[2, 3] y) {
    whole = Cast<to = 7>(x)
    back = CastLike(whole, x)
    y = Mul(x, back)
}
"""

CASES = [
    OpCase("Cast", (f(2, 3),), {"to": DOUBLE}, torch=lambda x: x),
    OpCase("Cast", (f(),), {"to": FLOAT}, torch=lambda x: x, forward="torch", id="scalar"),
    OpCase("CastLike", (f(2, 3), fixed(f(1))), torch=lambda x, t: x),
    OpCase(
        "CastLike",
        (f(2, 3),),
        model=THROUGH_INTEGERS,
        torch=lambda x: x * x.detach().trunc(),
        id="integers-stop",
    ),
]
