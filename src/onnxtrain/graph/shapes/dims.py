"""Symbolic dimensions: polynomials in named sizes, written as plain strings.

A dimension is an ``int``, a string such as ``"batch*196"`` or ``"(width + 1)//2"``, or ``None`` if
unknown. Strings have a canonical form: two dimensions are provably equal exactly when they compare
equal.

Work is bounded. A result with more than a few hundred factors or with a coefficient beyond 64 bits
is unknown; a dimension name that would expand to such a result is treated as an opaque symbol.

>>> mul("batch", 2)
'2*batch'
>>> floordiv(mul("batch", 12), 4)
'3*batch'
>>> add(sub("n", 1), 1)
'n'

The last section expands Einsum equations.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import keyword
import re
import string
from collections.abc import Callable, Iterable, Sequence

Dim = int | str | None
"""A dimension: an integer, a canonical expression, or ``None`` if unknown."""

_Monomial = tuple[str, ...]
_Poly = tuple[tuple[_Monomial, int], ...]

_MAX_FACTORS = 256  # over all terms of a polynomial; each coefficient counts as a factor
_MAX_CHARACTERS = 4096  # of all names in a polynomial
_MAX_COEFFICIENT = 1 << 63  # sizes are 64-bit integers


class _TooLargeError(ValueError):
    """A polynomial exceeds the budget."""


def dim(value: object) -> Dim:
    """Return the canonical form of a dimension read from a model.

    >>> dim("2 * n + n")
    '3*n'
    """
    if value is None or isinstance(value, int):
        return value
    text = str(value)
    return _text(_parse(text)) if text else None


def symbol(name: str) -> str:
    """Return ``name`` as an identifier; escape other characters and Python keywords."""
    if name.isidentifier() and not keyword.iskeyword(name):
        return name
    safe = re.sub(r"[^A-Za-z0-9_]", lambda m: f"_x{ord(m.group()):x}_", name)
    return safe if safe.isidentifier() and not keyword.iskeyword(safe) else f"d_{safe}"


def add(a: Dim, b: Dim) -> Dim:
    """Return ``a + b``."""
    return _apply(_add, a, b)


def sub(a: Dim, b: Dim) -> Dim:
    """Return ``a - b``."""
    return _apply(lambda p, q: _add(p, _mul(q, _constant(-1))), a, b)


def mul(a: Dim, b: Dim) -> Dim:
    """Return ``a * b``."""
    if a == 0 or b == 0:
        return 0
    return _apply(_mul, a, b)


def floordiv(a: Dim, b: Dim) -> Dim:
    """Return ``a // b``, reduced where the division is exact."""
    return None if b == 0 else _apply(_floordiv, a, b)


def product(dims: Iterable[Dim]) -> Dim:
    """Return the number of elements of a tensor with these dimensions."""
    total: Dim = 1
    for d in dims:
        total = mul(total, d)
    return total


def static_sizes(dims: Sequence[Dim] | None) -> list[int] | None:
    """Return the dimensions as integers if all of them are static, else ``None``.

    >>> static_sizes([2, 3]), static_sizes([2, "n"])
    ([2, 3], None)
    """
    if dims is None:
        return None
    sizes = [d for d in dims if isinstance(d, int)]
    return sizes if len(sizes) == len(dims) else None


def shapes_differ(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Return whether two shapes provably differ: in rank, or in an axis that is static in both.

    >>> shapes_differ([2, "n"], [2, 3]), shapes_differ(["n", 2], ["n", 3])
    (False, True)
    """
    return len(a) != len(b) or any(
        isinstance(p, int) and isinstance(q, int) and p != q for p, q in zip(a, b, strict=True)
    )


def symbols(d: Dim) -> set[str]:
    """Return the names of the symbols in a dimension."""
    if not isinstance(d, str):
        return set()
    return set(re.findall(r"[A-Za-z_]\w*", d))


def substitute(d: Dim, values: dict[str, Dim]) -> Dim:
    """Replace symbols in a dimension by other dimensions."""
    if not isinstance(d, str) or not symbols(d) & values.keys():
        return d
    return _evaluate(ast.parse(d, mode="eval").body, values)


def broadcast(a: Dim, b: Dim) -> Dim:
    """Return the size to which ``a`` and ``b`` broadcast, ``None`` if it is unknown."""
    if a == b:
        return a
    if a == 1:
        return b
    if b == 1:
        return a
    if isinstance(a, int) and a > 1:
        return a
    if isinstance(b, int) and b > 1:
        return b
    return None


def broadcast_shapes(a: Sequence[Dim], b: Sequence[Dim]) -> list[Dim]:
    """Return the shape to which two shapes broadcast; unknown sizes are ``None``.

    >>> broadcast_shapes([4, 1], ["n", 4, 5])
    ['n', 4, 5]
    """
    rank = max(len(a), len(b))
    left, right = ([1] * (rank - len(t)) + list(t) for t in (a, b))
    return [broadcast(p, q) for p, q in zip(left, right, strict=True)]


def _apply(f: Callable[[_Poly, _Poly], _Poly], a: Dim, b: Dim) -> Dim:
    if a is None or b is None:
        return None
    try:
        return _text(f(_parse(a), _parse(b)))
    except _TooLargeError:
        return None


_OPERATORS: dict[type[ast.operator], Callable[[Dim, Dim], Dim]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.FloorDiv: floordiv,
}


def _evaluate(node: ast.expr, values: dict[str, Dim]) -> Dim:
    match node:
        case ast.Constant(value=int(v)):
            return v
        case ast.Name(id=name):
            return values.get(name, name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return sub(0, _evaluate(operand, values))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, values), _evaluate(right, values))
        case _:
            raise ValueError(f"not a dimension: {ast.dump(node)}")


def _constant(n: int) -> _Poly:
    return (((), n),) if n else ()


@functools.lru_cache(maxsize=65536)
def _parse(value: int | str) -> _Poly:
    if isinstance(value, int):
        return _constant(value)
    try:
        return _parse_expression(ast.parse(value, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return (((symbol(value),), 1),)


def _parse_expression(node: ast.expr) -> _Poly:
    match node:
        case ast.Constant(value=int(v)) if not isinstance(v, bool):
            return _check_budget(_constant(v))
        case ast.Name(id=name):
            return (((name,), 1),)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _mul(_parse_expression(operand), _constant(-1))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _add(_parse_expression(left), _parse_expression(right))
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            negative = _mul(_parse_expression(right), _constant(-1))
            return _add(_parse_expression(left), negative)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _mul(_parse_expression(left), _parse_expression(right))
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return _floordiv(_parse_expression(left), _parse_expression(right))
        case _:
            raise ValueError("not a dimension expression")


def _canonical(terms: dict[_Monomial, int]) -> _Poly:
    return _check_budget(tuple(sorted((m, c) for m, c in terms.items() if c)))


def _check_budget(p: _Poly) -> _Poly:
    """Return ``p`` if it is within the budget.

    Each step is checked, because products of sums grow exponentially.

    Raises:
        _TooLargeError: ``p`` exceeds the budget.
    """
    if len(p) == 1 and not p[0][0]:
        within = -_MAX_COEFFICIENT <= p[0][1] < _MAX_COEFFICIENT
    else:
        within = (
            sum(len(m) + 1 for m, _ in p) <= _MAX_FACTORS
            and sum(len(name) for m, _ in p for name in m) <= _MAX_CHARACTERS
            and all(-_MAX_COEFFICIENT <= c < _MAX_COEFFICIENT for _, c in p)
        )
    if not within:
        raise _TooLargeError("too many terms in a size")
    return p


def _add(p: _Poly, q: _Poly) -> _Poly:
    terms = dict(p)
    for m, c in q:
        terms[m] = terms.get(m, 0) + c
    return _canonical(terms)


def _mul(p: _Poly, q: _Poly) -> _Poly:
    if len(p) * len(q) > _MAX_FACTORS * 4:
        raise _TooLargeError("too many terms in a product of sizes")
    terms: dict[_Monomial, int] = {}
    for m, c in p:
        for n, d in q:
            key = tuple(sorted(m + n))
            terms[key] = terms.get(key, 0) + c * d
    return _canonical(terms)


def _floordiv(p: _Poly, q: _Poly) -> _Poly:
    if q == _constant(1):
        return p
    if p == q:
        return _constant(1)
    if len(q) == 1:
        (divisor, coefficient) = q[0]
        terms: dict[_Monomial, int] = {}
        for m, c in p:
            rest = _divide_monomial(m, divisor)
            if rest is None or c % coefficient:
                break
            terms[rest] = c // coefficient
        else:
            return _canonical(terms)
    if all(m == () for m, _ in p) and all(m == () for m, _ in q) and q:
        return _constant(dict(p).get((), 0) // dict(q)[()])
    return _check_budget((((f"(({_text(p)})//({_text(q)}))",), 1),))


def _divide_monomial(m: _Monomial, divisor: _Monomial) -> _Monomial | None:
    rest = list(m)
    for name in divisor:
        if name not in rest:
            return None
        rest.remove(name)
    return tuple(rest)


@functools.lru_cache(maxsize=65536)
def _text(p: _Poly) -> int | str:
    if not p:
        return 0
    if len(p) == 1 and p[0][0] == ():
        return p[0][1]
    parts: list[str] = []
    # Symbols first, the constant term last: "n + 1", not "1 + n".
    for m, c in sorted(p, key=lambda t: (t[0] == (), t[0])):
        body = "*".join(m)
        if not m:
            parts.append(str(c))
        elif c == 1:
            parts.append(body)
        elif c == -1:
            parts.append(f"-{body}")
        else:
            parts.append(f"{c}*{body}")
    return " + ".join(parts).replace("+ -", "- ")


@dataclasses.dataclass(frozen=True)
class Equation:
    """An Einsum equation without ellipsis and with an explicit output; each letter is an axis."""

    terms: tuple[str, ...]
    output: str
    ellipsis: str
    """Letters that replace the axes of the ellipsis, which broadcast."""


LETTERS = string.ascii_lowercase + string.ascii_uppercase


def unused_letters(*texts: str) -> list[str]:
    """Return the letters that do not occur in the texts."""
    used = set("".join(texts))
    return [c for c in LETTERS if c not in used]


def expand_equation(equation: str, ranks: Sequence[int]) -> Equation | None:
    """Rewrite an Einsum equation without spaces and ellipsis and with an explicit output.

    Return ``None`` if the equation does not match operands of these ranks.

    >>> expand_equation("...ij, j", [3, 1])
    Equation(terms=('aij', 'j'), output='ai', ellipsis='a')
    """
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        return None
    letters = [t.replace("...", "") for t in terms]
    extra = [rank - len(t) for rank, t in zip(ranks, letters, strict=True)]
    if any(e < 0 or (e and "..." not in t) for e, t in zip(extra, terms, strict=True)):
        return None
    if not arrow:
        joined = "".join(letters)
        right = "".join(sorted(c for c in set(joined) if joined.count(c) == 1))
        right = "..." + right if "..." in left else right
    width, spare = max(extra), unused_letters(text)
    if width > len(spare):
        return None
    shared = "".join(spare[:width])
    output = right.replace("...", shared)
    if len(set(output)) != len(output) or not set(output) <= {*"".join(letters), *shared}:
        return None
    expanded = (t.replace("...", shared[width - e :]) for t, e in zip(terms, extra, strict=True))
    return Equation(tuple(expanded), output, shared)
