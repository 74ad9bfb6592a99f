"""Cases for softmax and its relatives."""

from __future__ import annotations

from tests.cases.base import OpCase, at, distinct, f

FAR = at([[1000.0, 0.0, 999.0], [-1000.0, -1000.0, -999.5]])

CASES = [
    OpCase("Softmax", (f(3, 4),), torch=lambda x: x.softmax(-1)),
    OpCase("Softmax", (f(2, 3, 4),), {"axis": 1}, torch=lambda x: x.softmax(1), id="axis"),
    OpCase("Softmax", (f(2, 3, 4),), {"axis": -3}, torch=lambda x: x.softmax(0), id="negative"),
    OpCase("Softmax", (FAR,), torch=lambda x: x.softmax(-1), id="far"),
    OpCase("LogSoftmax", (f(3, 4),), torch=lambda x: x.log_softmax(-1)),
    OpCase("LogSoftmax", (f(2, 3, 4),), {"axis": 1}, torch=lambda x: x.log_softmax(1), id="axis"),
    OpCase("LogSoftmax", (FAR,), torch=lambda x: x.log_softmax(-1), id="far", forward="torch"),
    OpCase("Hardmax", (distinct(3, 4),)),
    OpCase("Hardmax", (distinct(3, 4),), {"axis": 0}, id="axis"),
]
