"""Operators that may trade places, put into the order that costs less.

``MaxPool(Relu(x)) = Relu(MaxPool(x))``, as Relu is monotone. The gradients are the same, too: a
positive maximum is the same element, and from others nothing comes back. After the pooling there
are fewer elements to look at, forward and backward.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.graph import shapes as S
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.graph.nodes import is_op, nodes


def relu_after_maxpool(model: ir.Model, op: OpBuilder) -> int:
    """Put pooling by maximum in front of a Relu that nothing else reads; return how many moved."""
    graph, moved = model.graph, 0
    for pool in nodes(graph, "MaxPool"):
        x = pool.inputs[0]
        relu = None if x is None else x.producer()
        if x is None or relu is None or not is_op(relu, "Relu") or relu.graph is not graph:
            continue
        alone = len(x.uses()) == 1 and not x.is_graph_output()
        y = pool.outputs[0]
        if not alone or len(pool.outputs) > 1 or y.is_graph_output() or not _reads_input(pool):
            continue
        source = relu.inputs[0]
        assert source is not None
        readers = list(y.uses())
        pool.replace_input_with(0, source)
        after = ir.node("Relu", [y], name=f"{y.name}/relu")
        z = after.outputs[0]
        z.name, z.type = f"{y.name}/relu", y.type
        S.set_dims(z, S.dims_of(y) or ())
        for node, index in readers:
            node.replace_input_with(index, z)
        graph.remove(relu, safe=True)
        graph.insert_after(pool, [after])
        moved += 1
    return moved


def _reads_input(pool: ir.Node) -> bool:
    """Return whether every window reads more than padding, whose maximum is no element's."""
    kernel, pads = (pool.attributes.get(name) for name in ("kernel_shape", "pads"))
    ceil = pool.attributes.get("ceil_mode")
    if kernel is None or (ceil is not None and ceil.as_int()):
        return False
    sizes = list(kernel.as_ints()) * 2
    return pads is None or all(p < k for p, k in zip(pads.as_ints(), sizes, strict=True))
