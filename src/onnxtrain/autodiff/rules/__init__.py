"""Gradient rules, one file per family of operators.

A rule receives, in this order::

    op        the builder: op.MatMul(...) appends a node and returns its output
    dy        gradient of the loss w.r.t. the node's first output
    *inputs   the node's inputs, by position; an omitted optional input is None

and, by keyword, only what its signature asks for::

    y         the node's first output          outputs   all of them
    <name>    an attribute, default filled in  node      the ir.Node itself (last resort)
    wanted    one flag per input, captured ones last: is its gradient needed at all

It returns one gradient per input (trailing ones may be left out); ``None`` means "no gradient";
``undefined("why")`` marks a gradient without a formula, and raises only if it is needed.
Nodes with subgraphs return gradients for what the subgraphs capture
(``onnxtrain.graph.nodes.captured(node)``) after those of the inputs. Operators with several
differentiable outputs register with ``@vjp_multi`` and receive ``dys`` (``None`` = zero).

A rule rarely checks which gradients are needed (unused nodes are removed afterwards). It never
handles accumulation, broadcasting of elementwise operators, or legacy attributes (``prepare``
removed them). It emits only operators that have rules, so that higher derivatives work.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in sorted(m.name for m in iter_modules(__path__)):
    import_module(f"{__name__}.{_module}")
