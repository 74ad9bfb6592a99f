"""The role of each float tensor, by how it is used.

A tensor is followed through what only moves or combines constants, into bodies of If, Loop and Scan
as well, until it meets activations; there the operator tells. Several uses: one that trains is
enough, except for a single number. What stays doubtful does not train.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.nodes import is_op, key_of
from onnxtrain.graph.roles import fixed_values as V
from onnxtrain.graph.roles import names as N
from onnxtrain.graph.roles import table as T
from onnxtrain.graph.roles.flow import Flow
from onnxtrain.graph.roles.role import Role, constant, parameter

UNUSED = constant("no node reads it")
_LARGE = 1 << 20  # elements that are looked at


class Judge:
    """Tells the roles of the tensors of one graph."""

    def __init__(self, graph: ir.Graph) -> None:
        self.flow = Flow(graph)
        self._known: dict[ir.Value, Role] = {}
        self._kernels: dict[ir.Value, Role] = {}

    def role(self, value: ir.Value) -> Role:
        """Return the role of an initializer or of the output of a Constant node."""
        if value not in self._known:
            self._judge(value, self._known, is_kernel=False)
        return self._known[value]

    def kernel_role(self, value: ir.Value) -> Role:
        """Return the role that a bias asks for: where the kernel is a bias too, it asks no more.

        A tensor may be the kernel and the bias of one product.
        """
        if value not in self._kernels:
            self._judge(value, self._kernels, is_kernel=True)
        return self._kernels[value]

    def _judge(self, value: ir.Value, known: dict[ir.Value, Role], *, is_kernel: bool) -> None:
        tensor = tensor_of(value)
        if tensor is None:
            known[value] = constant("its values are not in the file")
            return
        case = _Case(self, value, tensor, is_kernel=is_kernel)
        known[value] = self._role(value, case, tensor)
        if not case.is_bias:  # both questions have one answer
            self._known[value] = self._kernels[value] = known[value]

    def _role(self, value: ir.Value, case: _Case, tensor: ir.TensorProtocol) -> Role:
        rank = len(tensor.shape)
        uses = list(case.uses(value))
        if not uses:
            return UNUSED
        training = [r for r in uses if r.trains]
        if not training or (tensor.size == 1 and len(training) < len(uses)):
            return next(r for r in uses if not r.trains)
        chosen, name = training[0], value.name or ""
        if rank == 0 and not case.named:
            return T.NUMBER  # biases and the like have an axis
        if N.names_statistic(name):
            return T.STATISTIC
        if N.names_constant(name) and chosen.kind not in ("bias", "normalisation"):
            return constant("a fixed table, by its name")
        if tensor.size < 8:
            return chosen
        fixed = V.fixed_values(_array(tensor), chosen.kind)
        return chosen if fixed is None else constant(fixed)


def tensor_of(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer or of a Constant node."""
    if value.const_value is not None:
        return value.const_value
    node = value.producer()
    if node is None or not is_op(node, "Constant"):
        return None
    attribute = node.attributes.get("value")
    if attribute is not None:
        return attribute.as_tensor()
    floats = node.attributes.get("value_floats") or node.attributes.get("value_float")
    if floats is None:
        return None
    return ir.Tensor(np.asarray(floats.value, np.float32), name=value.name)


def _array(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return the values as numpy's floats; of a large tensor, which may be mapped, the first."""
    array = tensor.numpy()
    if array.size > _LARGE:
        array = np.squeeze(array)
        array = array[: max(1, _LARGE * len(array) // array.size)]
    return array if array.dtype.kind == "f" else array.astype(np.float32)


class _Case:
    """One tensor on its way through the graph."""

    def __init__(
        self, judge: Judge, origin: ir.Value, tensor: ir.TensorProtocol, *, is_kernel: bool
    ) -> None:
        self.judge, self.flow, self.origin, self.size = judge, judge.flow, origin, tensor.size
        self.name = origin.name or ""
        self.named = N.names_scalar_parameter(self.name, len(tensor.shape))
        self.is_kernel = is_kernel  # it is asked for on behalf of a bias
        self.is_bias = False
        self.seen: set[ir.Value] = set()

    def uses(self, value: ir.Value) -> Iterator[Role]:
        """Return the role in each use of the values that the tensor becomes, in their order.

        The walk keeps its own stack: a chain of nodes may be longer than Python's.
        """
        walks = [self._steps(value)]
        while walks:
            step = next(walks[-1], None)
            if step is None:
                walks.pop()
            elif isinstance(step, Role):
                yield step
            else:
                walks.append(self._steps(step))

    def _steps(self, value: ir.Value) -> Iterator[Role | ir.Value]:
        """Return the role in each use of one value, or what the use makes of it."""
        if value in self.seen:
            return
        self.seen.add(value)
        for node, i in value.uses():
            yield from self._use(node, i, value)
        yield from self.flow.leaves_as(value)
        if self.flow.is_result(value):
            yield constant("a result as it is")

    def _use(self, node: ir.Node, i: int, value: ir.Value) -> Iterator[Role | ir.Value]:
        key = key_of(node)
        listed = T.ROLES.get(key, {}).get(i)
        if listed is T.STATE and self._is_learned_state():
            yield parameter("state", "a learned initial state")
        elif listed is T.BIAS:
            yield self._bias(node)
        elif listed is not None:
            yield listed if listed is not T.WEIGHT else self._operand(node, i)
        elif key in ("Loop", "Scan"):
            yield from self.flow.enters_as(node, i)
        elif key == "Pow" and i == 1:
            yield T.EXPONENT
        elif key in T.BOUNDS or key in T.COMPARISONS:
            yield constant(f"a bound of {key}")
        elif T.works_on_integers(key):
            yield T.QUANTISED
        elif i == 0 and key in T.MOVES:
            yield from node.outputs
        elif self.flow.is_static(node):
            yield from self._among_constants(node, key)
        else:
            yield self._beside_activations(node, i, key, value)

    def _bias(self, product: ir.Node | None) -> Role:
        """Return the role of a bias: that of a fixed filter is as fixed."""
        self.is_bias = True
        if self.is_kernel:
            return T.BIAS
        kernel = product.inputs[1] if product is not None and len(product.inputs) > 1 else None
        while kernel is not None and tensor_of(kernel) is None:
            mover = kernel.producer()
            kernel = mover.inputs[0] if mover is not None and key_of(mover) in T.MOVES else None
        tensor = None if kernel is None else tensor_of(kernel)
        if kernel is None or tensor is None or not tensor.dtype.is_floating_point():
            return T.BIAS
        return T.BIAS if self.judge.kernel_role(kernel).kind != "constant" else T.FIXED_BIAS

    def _operand(self, node: ir.Node, i: int) -> Role:
        """Return the role in a product: an expectation over bins and angles do not train."""
        other = node.inputs[1 - i] if i < 2 else None
        producer = None if other is None else self.flow.behind_moves(other)
        if producer is not None and is_op(producer, "Softmax"):
            tensor = tensor_of(self.origin)
            if tensor is not None and V.counts_up(_array(tensor)):
                return constant("the numbers of bins")
        return T.ANGLES if self.flow.becomes_angles(node) else T.WEIGHT

    def _is_learned_state(self) -> bool:
        tensor = tensor_of(self.origin)
        return (
            tensor is not None
            and tensor.size > 1
            and not N.is_automatic(self.name)
            and self.origin.producer() is None
            and bool(_array(tensor).any())
        )

    def _among_constants(self, node: ir.Node, key: str) -> Iterator[Role | ir.Value]:
        """Return roles behind arithmetic on constants alone: ``g * v / norm(v)``."""
        if self.size == 1 and key in T.ARITHMETIC and not self.named:
            yield T.NUMBER
            return
        if self.flow.becomes_angles(node):
            yield T.ANGLES
            return
        yield from node.outputs

    def _beside_activations(self, node: ir.Node, i: int, key: str, value: ir.Value) -> Role:
        if key in T.ARITHMETIC:
            return self._arithmetic(node, key)
        if key in ("Gather", "GatherElements", "GatherND") and i == 0:
            return T.EMBEDDING if self.size > 1 else T.NUMBER
        if key == "Einsum":
            return T.WEIGHT
        if key == "Concat":
            return T.TOKEN if self._may_be_learned() else constant("a filler of Concat")
        if key == "Where":
            learned = not N.is_automatic(self.name) and self._may_be_learned()
            return T.TOKEN if learned else constant("a filler of Where")
        if key == "Conv" and i == 0:
            return parameter("weight", "an image that is convolved")
        if "::" in key and self.size > 1 and not key.startswith(("com.microsoft::", "ai.onnx")):
            return parameter("weight", f"an input of {key}")
        return constant(f"an input of {key}")

    def _may_be_learned(self) -> bool:
        """Return whether there are several values that differ."""
        tensor = tensor_of(self.origin)
        if tensor is None or self.size < 2:
            return False
        flat = _array(tensor).reshape(-1)
        return bool((flat != flat[0]).any())

    def _arithmetic(self, node: ir.Node, key: str) -> Role:
        """Return the role of a tensor in sums and products with activations."""
        if key == "Mul" and self.flow.scales_integers(node):
            return T.QUANTISED
        if self.size == 1:
            if key == "Add" and self.flow.has_one_feature(node):
                return self._bias(self.flow.product_before(node))
            learned = T.BIAS if key == "Add" else T.SCALE
            return learned if self.named else T.NUMBER
        tensor = tensor_of(self.origin)
        assert tensor is not None
        automatic = N.is_automatic(self.name) or self.origin.producer() is not None
        if key in ("Add", "Sub", "Sum") and V.is_mask(_array(tensor)):
            return constant("a mask")
        if self.flow.is_on_input(node) and (automatic or key in ("Sub", "Div")):
            return constant("it scales or shifts an input")
        wide = sum(d > 1 for d in tensor.shape.numpy()) > 1
        if wide and automatic and not self._may_be_learned():
            return constant("one number all over")
        if key in ("Mul", "Div"):
            return T.ANGLES if self.flow.becomes_angles(node) else T.SCALE
        return T.TABLE if wide else self._bias(self.flow.product_before(node))


__all__ = ["UNUSED", "Judge", "tensor_of"]
