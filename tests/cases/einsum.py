"""Cases for Einsum."""

from __future__ import annotations

from functools import partial

import torch

from tests.cases.base import Draw, OpCase, f


def _case(equation: str, *inputs: Draw, id: str, **rest: object) -> OpCase:
    oracle = rest.pop("torch", partial(torch.einsum, equation))
    return OpCase("Einsum", inputs, {"equation": equation}, torch=oracle, id=id, **rest)


CASES = [
    _case("ij,jk->ik", f(3, 4), f(4, 5), id="matrix-product"),
    _case("bhid,bhjd->bhij", f(2, 2, 3, 4), f(2, 2, 5, 4), id="attention"),
    _case("ij, jk", f(3, 4), f(4, 5), id="implicit-output"),
    _case("ijk->ki", f(2, 3, 4), id="lone-index-summed"),
    _case("ij->", f(2, 3), id="total"),
    _case("ij,jk->k", f(3, 4), f(4, 5), id="lone-index-of-one-operand"),
    _case("i,j->ij", f(3), f(4), id="outer"),
    _case("i,i->", f(3), f(3), id="inner"),
    _case("i,ij,ijk,k->jk", f(2), f(2, 3), f(2, 3, 4), f(4), id="four-operands"),
    _case("ii->i", f(3, 3), id="diagonal"),
    _case("ii->", f(3, 3), id="trace"),
    _case("iij,jj->i", f(2, 2, 3), f(3, 3), id="two-diagonals"),
    _case("iii->i", f(3, 3, 3), id="triple-diagonal"),
    _case("bii,bi->b", f(2, 3, 3), f(2, 3), id="diagonal-and-product"),
    _case("...ij,...jk->...ik", f(2, 3, 4), f(2, 4, 5), id="ellipsis"),
    _case("...ij,...jk->...ik", f(2, 1, 3, 4), f(1, 5, 4, 2), id="ellipsis-broadcast"),
    _case("i...,...j->...ij", f(3, 2), f(2, 4), id="ellipsis-last"),
    _case("...i,i", f(2, 3, 4), f(4), id="ellipsis-on-one-side"),
    _case("...,...->...", f(2, 1), f(2, 3), id="ellipsis-alone"),
    _case("ij,ij->ij", f(2, 3), f(1, 3), id="size-one-broadcasts"),
    _case("ij,ij->j", f(1, 3), f(2, 3), id="size-one-summed"),
    _case("ij->ji", f(2, 3), id="transpose"),
    _case(",ij->ij", f(), f(2, 3), id="scalar-operand"),
]
