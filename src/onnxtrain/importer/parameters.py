"""Parameter detection: which float tensors of a file train, and why the others do not.

A list of parameters in the file's metadata decides. Otherwise ``ParameterClassifier`` follows a
tensor through operators that only move or combine constants, into bodies of If, Loop and Scan as
well, until an operator combines it with activations. ``INPUT_ROLES`` maps the input of that
operator to a role. If a tensor has several uses, one that trains is enough, except for a scalar. A
doubtful tensor does not train. Names help where use is ambiguous: torch's parameter names, names
that exporters generate, and usual names of fixed tables.

Read in this order: names, ``Role`` and ``INPUT_ROLES``, ``DataFlow``, ``ParameterClassifier``, then
``classify_parameters`` and ``lift_weights``.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.graph import formula_tables as V
from onnxtrain.graph.nodes import captured, is_op, op_key, subgraphs_of

_GENERATED_NAME = re.compile(
    r"^(\d+|_?v_\d+|val_\d+|onnx::.*|lifted_tensor_\d+|c?_?(lifted_)?tensor_constant\d*"
    r"|_constants?_?\d*|const(ant)?[._]?\d*|auto_.*|prepare/.*|scalar_tensor.*|fill\w*_?\d*"
    r"|const_fold_opt__\d+|\w*tmp_\d+)$"
    r"|_output_\d+$|(^|/)[Cc]onst(ant)?(_\d+)?(:\d+)?$|/(mul|add|sub|truediv|Pow|pow|Maximum)/[xy](:\d+)?$"
)
_CONSTANT_NAME = re.compile(
    r"(^|[._/])(inv_freqs?|(cos|sin)(_|s_)?(cached?|table)?|freqs?_(cis|cos|sin)|rotary_emb\w*|rope\w*"
    r"|sinusoid\w*|forward_basis_buffer|inverse_basis_buffer|\w*_buffer|mel_(basis|filters?|fb|weights?)"
    r"|melW|fbank|filter_?banks?|mel_scale|dft\w*|\w*hann\w*|hamming\w*|(stft_?)?window"
    r"|anchors?(_points|_grid)?|strides?_tensor|(attn|attention|causal|src|tgt)_?mask)$"
)
_STATISTIC_NAME = re.compile(r"(^|[._/])(running|moving|batch_norm)_?(mean|var\w*)(:\d+)?$", re.I)
_LEARNED_SCALAR = re.compile(
    r"(^|[._/])(logit_(scale|bias)|temperature|\w+_(scale|gain)|\w+\.[wb]_\d+(_deepcopy_\d+)?)$"
)
_LEARNED_SUFFIX = re.compile(  # exporters also use these words for the arguments of functions
    r"[._/](scale\d*|gain|gamma\d*|beta|alpha|weight|bias|temp|slope|gate|g|lambda\d*)$"
)
_LEARNED_VECTOR = re.compile(r"^(scale|gain|gamma|layer_scale|bias|weight)\d*$")


def is_generated_name(name: str) -> bool:
    """Return whether an exporter or optimizer generated the name, so that it has no meaning."""
    return _GENERATED_NAME.search(name) is not None


def is_constant_name(name: str) -> bool:
    """Return whether the name is usual for a fixed table, such as ``rotary.inv_freq``."""
    return _CONSTANT_NAME.search(name) is not None


def is_statistic_name(name: str) -> bool:
    """Return whether the name is that of a running mean or variance."""
    return _STATISTIC_NAME.search(name) is not None


def is_scalar_parameter_name(name: str, rank: int) -> bool:
    """Return whether the name is usual for a scalar parameter."""
    if is_generated_name(name):
        return False
    patterns = [_LEARNED_SCALAR, _LEARNED_SUFFIX, *([_LEARNED_VECTOR] if rank else [])]
    return any(pattern.search(name) is not None for pattern in patterns)


_MAX_NAMES = 6  # names in a line of a report


@dataclasses.dataclass(frozen=True)
class Role:
    """What a tensor is for, and whether it trains."""

    kind: str
    """``weight``, ``bias``, ``normalization``, ``embedding``, ``constant`` ..."""
    why: str
    """The reason, for reports."""
    trains: bool
    """Whether it is a parameter by default."""

    def __str__(self) -> str:
        return self.why if self.kind in self.why else f"{self.kind}: {self.why}"


def parameter(kind: str, why: str) -> Role:
    """Return the role of a tensor that trains."""
    return Role(kind, why, True)


def constant(why: str, kind: str = "constant") -> Role:
    """Return the role of a tensor that does not train."""
    return Role(kind, why, False)


def summarize_untrained(roles: Mapping[str, Role], names: Iterable[str]) -> list[str]:
    """Return a line for each reason why some of ``names`` are not parameters."""
    by_reason: dict[str, list[str]] = {}
    for name in names:
        role = roles.get(name)
        if role is not None and not role.trains:
            by_reason.setdefault(role.why, []).append(name)
    lines = []
    for why, members in sorted(by_reason.items(), key=lambda entry: (-len(entry[1]), entry[0])):
        more = f" and {len(members) - _MAX_NAMES} more" if len(members) > _MAX_NAMES else ""
        lines.append(f"not trained, {why}: {len(members)}: {', '.join(members[:_MAX_NAMES])}{more}")
    return lines


WEIGHT = parameter("weight", "an operand of a product")
KERNEL = parameter("weight", "the kernel of a convolution")
BIAS = parameter("bias", "a bias")
NORM = parameter("normalization", "scale or bias of a normalisation")
EMBEDDING = parameter("embedding", "a table that rows are taken from")
RECURRENT = parameter("recurrent weight", "a weight of a recurrent layer")
PRELU_SLOPE = parameter("slope", "a slope of PRelu")
SCALE = parameter("scale", "a learned scale")
TABLE = parameter("table", "a learned table added to activations")
TOKEN = parameter("token", "a learned token beside activations")

STATISTIC = constant("running statistics", "statistic")
QUANTIZATION = constant("a quantisation scale or zero point", "quantization")
ROTARY = constant("a table of sines and cosines")
FIXED_BIAS = constant("the bias of a fixed filter")
ANGLES = constant("frequencies of sines and cosines")
EXPONENT = constant("an exponent")
SCALAR = constant("a single number in arithmetic")
STATE = constant("an initial state")

_NORM_INPUTS = {1: NORM, 2: NORM}
_CONV_INPUTS = {1: KERNEL, 2: BIAS}

# An initializer at an input of a `com.microsoft` operator that is not listed is frozen.
INPUT_ROLES: dict[str, dict[int, Role]] = {
    "MatMul": {0: WEIGHT, 1: WEIGHT},
    "Gemm": {0: WEIGHT, 1: WEIGHT, 2: BIAS},
    "Conv": _CONV_INPUTS,
    "ConvTranspose": _CONV_INPUTS,
    "DeformConv": {1: KERNEL, 3: BIAS},
    "CausalConvWithState": _CONV_INPUTS,
    "LSTM": {1: RECURRENT, 2: RECURRENT, 3: RECURRENT, 5: STATE, 6: STATE, 7: RECURRENT},
    "GRU": {1: RECURRENT, 2: RECURRENT, 3: RECURRENT, 5: STATE},
    "RNN": {1: RECURRENT, 2: RECURRENT, 3: RECURRENT, 5: STATE},
    "BatchNormalization": {1: NORM, 2: NORM, 3: STATISTIC, 4: STATISTIC},
    "InstanceNormalization": _NORM_INPUTS,
    "LayerNormalization": _NORM_INPUTS,
    "GroupNormalization": _NORM_INPUTS,
    "RMSNormalization": {1: NORM},
    "SimplifiedLayerNormalization": {1: NORM},
    "PRelu": {1: PRELU_SLOPE},
    "RotaryEmbedding": {1: ROTARY, 2: ROTARY},
    "Attention": {3: constant("an attention mask")},
    "QuantizeLinear": {1: QUANTIZATION, 2: QUANTIZATION},
    "DequantizeLinear": {1: QUANTIZATION, 2: QUANTIZATION},
    "Clip": {1: constant("a bound of Clip"), 2: constant("a bound of Clip")},
    "Range": dict.fromkeys(range(3), constant("a bound of Range")),
    "Pad": {2: constant("a filler of Pad")},
    "Resize": {1: constant("a region of Resize"), 2: constant("scales of Resize")},
    "Upsample": {1: constant("scales of Resize")},
    "OneHot": {2: constant("on and off of OneHot")},
    "Dropout": {1: constant("a rate of Dropout")},
    "STFT": {2: constant("a window function")},
    "GridSample": {1: constant("a grid of places")},
    "ConstantOfShape": {0: constant("a shape")},
    "com.microsoft::FusedConv": _CONV_INPUTS,
    "com.microsoft::NhwcFusedConv": _CONV_INPUTS,
    "com.microsoft::NhwcConv": _CONV_INPUTS,
    "com.microsoft::FusedGemm": {0: WEIGHT, 1: WEIGHT, 2: BIAS},
    "com.microsoft::FusedMatMul": {0: WEIGHT, 1: WEIGHT},
    "com.microsoft::TransposeMatMul": {0: WEIGHT, 1: WEIGHT},
    "com.microsoft::FusedMatMulActivation": {0: WEIGHT, 1: WEIGHT},
    "com.microsoft::GemmFloat8": {0: WEIGHT, 1: WEIGHT, 2: BIAS},
    "com.microsoft::Attention": {1: WEIGHT, 2: BIAS},
    "com.microsoft::PackedAttention": {1: WEIGHT, 2: BIAS},
    "com.microsoft::MultiHeadAttention": {3: BIAS},
    "com.microsoft::PackedMultiHeadAttention": {3: BIAS},
    "com.microsoft::DecoderMaskedMultiHeadAttention": {10: BIAS},
    "com.microsoft::GroupQueryAttention": {7: ROTARY, 8: ROTARY},
    "com.microsoft::SparseAttention": {9: ROTARY, 10: ROTARY},
    "com.microsoft::WordConvEmbedding": {1: WEIGHT, 2: BIAS, 3: EMBEDDING},
    "com.microsoft::RotaryEmbedding": {2: ROTARY, 3: ROTARY},
    "com.microsoft::LayerNormalization": _NORM_INPUTS,
    "com.microsoft::SimplifiedLayerNormalization": {1: NORM},
    "com.microsoft::SkipLayerNormalization": {2: NORM, 3: NORM, 4: BIAS},
    "com.microsoft::SkipSimplifiedLayerNormalization": {2: NORM, 3: BIAS},
    "com.microsoft::EmbedLayerNormalization": {
        **dict.fromkeys((2, 3, 4), EMBEDDING),
        **dict.fromkeys((5, 6), NORM),
    },
    "com.microsoft::GroupNorm": _NORM_INPUTS,
    "com.microsoft::SkipGroupNorm": {1: NORM, 2: NORM, 4: BIAS},
    "com.microsoft::BiasGelu": {1: BIAS},
    "com.microsoft::FastGelu": {1: BIAS},
    "com.microsoft::BiasSplitGelu": {1: BIAS},
    "com.microsoft::BiasAdd": {1: BIAS},
    "com.microsoft::BiasDropout": {1: BIAS},
    "com.microsoft::BiasSoftmax": {1: constant("an attention mask")},
    "com.microsoft::MatMulNBits": {2: QUANTIZATION, 3: QUANTIZATION, 5: BIAS},
    "com.microsoft::MatMulBnb4": {2: QUANTIZATION},
    "com.microsoft::GatherBlockQuantized": {2: QUANTIZATION, 3: QUANTIZATION},
    "com.microsoft::QuantizeLinear": {1: QUANTIZATION, 2: QUANTIZATION},
    "com.microsoft::DequantizeLinear": {1: QUANTIZATION, 2: QUANTIZATION},
    "com.microsoft::MoE": {
        **dict.fromkeys((2, 4, 6), WEIGHT),
        **dict.fromkeys((3, 5, 7), BIAS),
    },
    "com.microsoft::CausalConvWithState": {1: KERNEL, 2: BIAS},
}
"""Roles by operator and input index; ``ParameterClassifier`` decides about other inputs."""

ARITHMETIC_OPS = frozenset({"Add", "Sub", "Mul", "Div", "Sum", "Mean"})
MIN_MAX_OPS = frozenset({"Max", "Min"})
COMPARISON_OPS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
MATMUL_OPS = frozenset(
    (
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "MatMulInteger", "ConvInteger"),
        *("com.microsoft::MatMulNBits", "com.microsoft::FusedMatMul", "com.microsoft::FusedConv"),
        *("com.microsoft::MatMulBnb4", "com.microsoft::NhwcConv", "DeformConv"),
    )
)
MOVEMENT_OPS = frozenset(
    (
        *("Identity", "Cast", "CastLike", "Transpose", "Reshape", "Flatten", "Unsqueeze"),
        *("Squeeze", "Slice", "Split", "Expand", "Tile", "DepthToSpace", "SpaceToDepth"),
        *("QuantizeLinear", "DequantizeLinear", "Trilu", "Pad", "Dropout"),
    )
)
"""Operators that only move or convert the elements of their first input."""

RANDOM_OPS = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike"})
_INTEGER_PREFIXES = ("QLinear", "com.microsoft::QLinear", "com.microsoft::DynamicQuantize")
_INTEGER_OPS = frozenset(
    (
        *("com.microsoft::QAttention", "com.microsoft::QGemm", "com.microsoft::QMoE"),
        *("com.microsoft::MatMulIntegerToFloat", "com.microsoft::QEmbedLayerNormalization"),
        *("com.microsoft::QOrderedMatMul",),
    )
)


def is_integer_op(key: str) -> bool:
    """Return whether the float inputs of an operator are quantization scales."""
    return key in _INTEGER_OPS or key.startswith(_INTEGER_PREFIXES)


_INPUT_PREPROCESSING_OPS = (
    MOVEMENT_OPS | ARITHMETIC_OPS | {"Concat", "Clip", "Resize", "Gather", "Unsqueeze"}
)


class DataFlow:
    """Data flow facts that parameter detection reads.

    Which values are constant, which are preprocessed inputs, and how values enter and leave bodies.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._fixed: set[ir.Value] = set()  # values that do not depend on an input
        self._preprocessed_inputs: set[ir.Value] = set()  # inputs, at most moved and scaled
        self._leaves: dict[ir.Value, list[ir.Value]] = {}  # result of a body -> outputs of its node
        self._results = set(graph.outputs)
        self._preprocessed_inputs.update(
            x for x in graph.inputs if x.name not in graph.initializers
        )
        self._visit(graph)

    def is_static(self, node: ir.Node) -> bool:
        """Return whether a node has only constant inputs."""
        return all(y in self._fixed for y in node.outputs)

    def is_result(self, value: ir.Value) -> bool:
        """Return whether a value is an output of the whole graph."""
        return value in self._results

    def combines_with_input(self, node: ir.Node) -> bool:
        """Return whether a node reads a graph input, at most moved and scaled."""
        return any(x in self._preprocessed_inputs for x in node.inputs if x is not None)

    def body_inputs(self, node: ir.Node, i: int) -> list[ir.Value]:
        """Return the body input for an input of Loop or Scan."""
        (body,) = subgraphs_of(node)
        return [body.inputs[i]] if i < len(body.inputs) else []

    def outer_outputs(self, value: ir.Value) -> list[ir.Value]:
        """Return the node outputs for an output of a body."""
        return self._leaves.get(value, [])

    def producer_through_views(self, value: ir.Value) -> ir.Node | None:
        """Return the producer of a value, skipping nodes that only move it."""
        node = value.producer()
        while node is not None and op_key(node) in MOVEMENT_OPS and node.inputs[0] is not None:
            node = node.inputs[0].producer()
        return node

    def preceding_matmul(self, node: ir.Node) -> ir.Node | None:
        """Return the matmul or convolution whose result a node reads, if any."""
        products = (self._matmul_of(x) for x in node.inputs if x is not None)
        return next((p for p in products if p is not None), None)

    def has_single_output_feature(self, node: ir.Node) -> bool:
        """Return whether a node reads a matmul or convolution with a single output feature."""
        for x in node.inputs:
            product = None if x is None else self._matmul_of(x)
            if product is None or len(product.inputs) < 2:
                continue
            w = product.inputs[1]
            dims = None if w is None or w.const_value is None else w.const_value.shape.numpy()
            at = {"Conv": 0, "FusedConv": 0, "ConvTranspose": 1}.get(product.op_type, -1)
            if dims and dims[at] == 1:
                return True
        return False

    def feeds_sin_and_cos(self, node: ir.Node) -> bool:
        """Return whether only Sin and Cos read the outputs of a node."""
        readers: set[str] = set()
        pending, seen = list(node.outputs), set(node.outputs)
        while pending:
            for reader, _ in pending.pop().uses():
                key = op_key(reader)
                if key in MOVEMENT_OPS or key == "Concat":
                    new = [y for y in reader.outputs if y not in seen]
                    seen.update(new)
                    pending.extend(new)
                else:
                    readers.add(key)
        return readers == {"Sin", "Cos"}

    def rescales_integer_matmul(self, node: ir.Node) -> bool:
        """Return whether a node rescales the result of an integer matmul."""
        makers = [self.producer_through_views(x) for x in node.inputs if x is not None]
        return any(
            is_op(m, "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger")
            for m in makers
            if m is not None
        )

    def _matmul_of(self, value: ir.Value) -> ir.Node | None:
        node = self.producer_through_views(value)
        return node if node is not None and op_key(node) in MATMUL_OPS else None

    def _visit(self, graph: ir.Graph) -> None:
        self._fixed.update(graph.initializers.values())
        for node in graph:
            for body in subgraphs_of(node):
                if is_op(node, "Scan"):
                    self._scan_inputs(node, body)
                self._visit(body)
                self._note_results(node, body)
            sources = [x for x in (*node.inputs, *captured(node)) if x is not None]
            random = op_key(node) in RANDOM_OPS or is_op(node, "Loop")
            if not random and all(x in self._fixed for x in sources):
                self._fixed.update(node.outputs)
            elif op_key(node) in _INPUT_PREPROCESSING_OPS and all(
                x in self._preprocessed_inputs or x in self._fixed for x in sources
            ):
                self._preprocessed_inputs.update(node.outputs)

    def _scan_inputs(self, node: ir.Node, body: ir.Graph) -> None:
        scanned = node.attributes["num_scan_inputs"].as_int()
        first = len(node.inputs) - scanned
        for inner, outer in zip(body.inputs[first:], node.inputs[first:], strict=False):
            if outer in self._fixed:
                self._fixed.add(inner)

    def _note_results(self, node: ir.Node, body: ir.Graph) -> None:
        skipped = 1 if is_op(node, "Loop") else 0
        for inner, outer in zip(body.outputs[skipped:], node.outputs, strict=False):
            self._leaves.setdefault(inner, []).append(outer)


def float_tensors(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the initializers and the outputs of Constant nodes, including bodies, in order."""
    yield from graph.initializers.values()
    for node in graph:
        if is_op(node, "Constant"):
            yield node.outputs[0]
        for body in subgraphs_of(node):
            yield from float_tensors(body)


UNUSED = constant("no node reads it")
_MAX_INSPECTED_ELEMENTS = 1 << 20  # elements that are looked at


class ParameterClassifier:
    """Decides the role of each float tensor of a graph by its uses."""

    def __init__(self, graph: ir.Graph) -> None:
        self.flow = DataFlow(graph)
        self._known: dict[ir.Value, Role] = {}
        self._kernels: dict[ir.Value, Role] = {}

    def role(self, value: ir.Value) -> Role:
        """Return the role of an initializer or of the output of a Constant node."""
        if value not in self._known:
            self._classify(value, self._known, is_kernel=False)
        return self._known[value]

    def kernel_role(self, value: ir.Value) -> Role:
        """Return the role of a kernel, to decide the role of its bias.

        A tensor may be the kernel and the bias of the same matmul. ``is_kernel`` stops the
        recursion.
        """
        if value not in self._kernels:
            self._classify(value, self._kernels, is_kernel=True)
        return self._kernels[value]

    def _classify(self, value: ir.Value, known: dict[ir.Value, Role], *, is_kernel: bool) -> None:
        tensor = tensor_of(value)
        if tensor is None:
            known[value] = constant("its values are not in the file")
            return
        case = _TensorUses(self, value, tensor, is_kernel=is_kernel)
        known[value] = self._role(value, case, tensor)
        if not case.is_bias:  # then the role does not depend on `is_kernel`
            self._known[value] = self._kernels[value] = known[value]

    def _role(self, value: ir.Value, case: _TensorUses, tensor: ir.TensorProtocol) -> Role:
        rank = len(tensor.shape)
        uses = list(case.uses(value))
        if not uses:
            return UNUSED
        training = [r for r in uses if r.trains]
        if not training or (tensor.size == 1 and len(training) < len(uses)):
            return next(r for r in uses if not r.trains)
        chosen, name = training[0], value.name or ""
        if rank == 0 and not case.named:
            return SCALAR  # a learned bias or scale has an axis
        if is_statistic_name(name):
            return STATISTIC
        if is_constant_name(name) and chosen.kind not in ("bias", "normalization"):
            return constant("a fixed table, by its name")
        if tensor.size < 8:
            return chosen
        fixed = V.detect_formula_table(_array(tensor), chosen.kind)
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
    """Return the elements as numpy floats; only the first ones of a large, mapped tensor."""
    array = tensor.numpy()
    if array.size > _MAX_INSPECTED_ELEMENTS:
        array = np.squeeze(array)
        array = array[: max(1, _MAX_INSPECTED_ELEMENTS * len(array) // array.size)]
    return array if array.dtype.kind == "f" else array.astype(np.float32)


class _TensorUses:
    """The uses of one tensor, followed through the graph."""

    def __init__(
        self,
        classifier: ParameterClassifier,
        origin: ir.Value,
        tensor: ir.TensorProtocol,
        *,
        is_kernel: bool,
    ) -> None:
        self.classifier, self.flow, self.origin, self.size = (
            classifier,
            classifier.flow,
            origin,
            tensor.size,
        )
        self.name = origin.name or ""
        self.named = is_scalar_parameter_name(self.name, len(tensor.shape))
        self.is_kernel = is_kernel  # classified to decide the role of a bias
        self.is_bias = False
        self.seen: set[ir.Value] = set()

    def uses(self, value: ir.Value) -> Iterator[Role]:
        """Yield the role of each use of the tensor and of values derived from it, in order.

        Uses an explicit stack, because chains of nodes may exceed Python's recursion limit.
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
        """Yield the role in each use of a value, or the value derived from it."""
        if value in self.seen:
            return
        self.seen.add(value)
        for node, i in value.uses():
            yield from self._use(node, i, value)
        yield from self.flow.outer_outputs(value)
        if self.flow.is_result(value):
            yield constant("a result as it is")

    def _use(self, node: ir.Node, i: int, value: ir.Value) -> Iterator[Role | ir.Value]:
        key = op_key(node)
        listed = INPUT_ROLES.get(key, {}).get(i)
        if listed is STATE and self._is_learned_state():
            yield parameter("state", "a learned initial state")
        elif listed is BIAS:
            yield self._bias(node)
        elif listed is not None:
            yield listed if listed is not WEIGHT else self._operand(node, i)
        elif key in ("Loop", "Scan"):
            yield from self.flow.body_inputs(node, i)
        elif key == "Pow" and i == 1:
            yield EXPONENT
        elif key in MIN_MAX_OPS or key in COMPARISON_OPS:
            yield constant(f"a bound of {key}")
        elif is_integer_op(key):
            yield QUANTIZATION
        elif i == 0 and key in MOVEMENT_OPS:
            yield from node.outputs
        elif self.flow.is_static(node):
            yield from self._combined_with_constants(node, key)
        else:
            yield self._combined_with_activations(node, i, key, value)

    def _bias(self, product: ir.Node | None) -> Role:
        """Return the role of a bias: fixed if its kernel is fixed."""
        self.is_bias = True
        if self.is_kernel:
            return BIAS
        kernel = product.inputs[1] if product is not None and len(product.inputs) > 1 else None
        while kernel is not None and tensor_of(kernel) is None:
            mover = kernel.producer()
            kernel = (
                mover.inputs[0] if mover is not None and op_key(mover) in MOVEMENT_OPS else None
            )
        tensor = None if kernel is None else tensor_of(kernel)
        if kernel is None or tensor is None or not tensor.dtype.is_floating_point():
            return BIAS
        return BIAS if self.classifier.kernel_role(kernel).kind != "constant" else FIXED_BIAS

    def _operand(self, node: ir.Node, i: int) -> Role:
        """Return the role of a matmul operand. Bins of an expectation and angles do not train."""
        other = node.inputs[1 - i] if i < 2 <= len(node.inputs) else None
        producer = None if other is None else self.flow.producer_through_views(other)
        if producer is not None and is_op(producer, "Softmax"):
            tensor = tensor_of(self.origin)
            if tensor is not None and V.is_arange(_array(tensor)):
                return constant("the numbers of bins")
        return ANGLES if self.flow.feeds_sin_and_cos(node) else WEIGHT

    def _is_learned_state(self) -> bool:
        tensor = tensor_of(self.origin)
        return (
            tensor is not None
            and tensor.size > 1
            and not is_generated_name(self.name)
            and self.origin.producer() is None
            and bool(_array(tensor).any())
        )

    def _combined_with_constants(self, node: ir.Node, key: str) -> Iterator[Role | ir.Value]:
        """Yield roles behind arithmetic on constants, such as weight norm ``g * v / norm(v)``."""
        if self.size == 1 and key in ARITHMETIC_OPS and not self.named:
            yield SCALAR
            return
        if self.flow.feeds_sin_and_cos(node):
            yield ANGLES
            return
        yield from node.outputs

    def _combined_with_activations(self, node: ir.Node, i: int, key: str, value: ir.Value) -> Role:
        if key in ARITHMETIC_OPS:
            return self._arithmetic(node, key)
        if key in ("Gather", "GatherElements", "GatherND") and i == 0:
            return EMBEDDING if self.size > 1 else SCALAR
        if key == "Einsum":
            return WEIGHT
        if key == "Concat":
            return TOKEN if self._may_be_learned() else constant("a filler of Concat")
        if key == "Where":
            learned = not is_generated_name(self.name) and self._may_be_learned()
            return TOKEN if learned else constant("a filler of Where")
        if key == "Conv" and i == 0:
            return parameter("weight", "an image that is convolved")
        if "::" in key and self.size > 1 and not key.startswith(("com.microsoft::", "ai.onnx")):
            return parameter("weight", f"an input of {key}")
        return constant(f"an input of {key}")

    def _may_be_learned(self) -> bool:
        """Return whether the tensor has elements that differ."""
        tensor = tensor_of(self.origin)
        if tensor is None or self.size < 2:
            return False
        flat = _array(tensor).reshape(-1)
        return bool((flat != flat[0]).any())

    def _arithmetic(self, node: ir.Node, key: str) -> Role:
        """Return the role of a tensor that is added to or multiplied with activations."""
        if key == "Mul" and self.flow.rescales_integer_matmul(node):
            return QUANTIZATION
        if self.size == 1:
            if key == "Add" and self.flow.has_single_output_feature(node):
                return self._bias(self.flow.preceding_matmul(node))
            learned = BIAS if key == "Add" else SCALE
            return learned if self.named else SCALAR
        tensor = tensor_of(self.origin)
        assert tensor is not None
        automatic = is_generated_name(self.name) or self.origin.producer() is not None
        if key in ("Add", "Sub", "Sum") and V.is_mask(_array(tensor)):
            return constant("a mask")
        if self.flow.combines_with_input(node) and (automatic or key in ("Sub", "Div")):
            return constant("it scales or shifts an input")
        wide = sum(d > 1 for d in tensor.shape.numpy()) > 1
        if wide and automatic and not self._may_be_learned():
            return constant("one number all over")
        if key in ("Mul", "Div"):
            return ANGLES if self.flow.feeds_sin_and_cos(node) else SCALE
        return TABLE if wide else self._bias(self.flow.preceding_matmul(node))


PARAMETERS = "onnxtrain.parameters"
"""Metadata key of a model: names of its parameters as a JSON list, if the exporter knows them."""
FROZEN = "onnxtrain.frozen"
"""Metadata key of a model: names of parameters that are frozen by default, as a JSON list."""
ADAPTERS = "onnxtrain.adapters"
"""Metadata key of a model: names of its adapters in other formats, as JSON."""

_FLOATS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
)
_LISTED = parameter("parameter", "a parameter, as the maker of the file says")
_UNLISTED = constant("no parameter, as the maker of the file says")
_LISTED_FROZEN = constant("frozen, as the maker of the file says", _LISTED.kind)
_EMPTY_TENSOR = constant("an empty tensor")


def lift_weights(model: ir.Model) -> list[str]:
    """Turn weights in Constant nodes and bodies into initializers, in place; return their names.

    Includes running statistics. Other constants stay where they are.
    """
    graph = model.graph
    if _is_listed(model):
        return []
    classifier = ParameterClassifier(graph)
    own = set(graph.initializers.values())
    hidden = [
        x
        for x in float_tensors(graph)
        if x not in own and _is_float(x) and _is_state(classifier.role(x))
    ]
    if not hidden:
        return []
    uses = Counter(y.name for n in graph.all_nodes() for y in n.outputs)
    uses.update(x.name for x in graph.inputs)
    uses.update(x.name for x in float_tensors(graph) if x.producer() is None)
    return [_lift_weight(graph, x, uses) for x in hidden]


def classify_parameters(model: ir.Model) -> dict[str, Role]:
    """Return the role of every float initializer of the main graph, by name.

    A list of parameters in the file decides. If some of its names are missing, a tool has changed
    the file since: tensors with a listed name are parameters, and uses decide about the others.
    """
    floats = {n: x for n, x in model.graph.initializers.items() if _is_float(x)}
    listed, frozen = _listed(model) or set(), _listed(model, FROZEN) or set()
    other = {n: _EMPTY_TENSOR for n, x in floats.items() if x.shape is not None and 0 in x.shape}
    if _is_listed(model):
        found = {n: _LISTED if n in listed else _UNLISTED for n in floats}
    else:
        classifier = ParameterClassifier(model.graph)
        found = {n: _LISTED if n in listed else classifier.role(x) for n, x in floats.items()}
    return found | {n: _LISTED_FROZEN for n in frozen if n in found and found[n].trains} | other


def kinds_by_use(model: ir.Model, known: Mapping[str, Role]) -> dict[str, str]:
    """Return the kind of every float initializer by its uses, including listed parameters."""
    classifier: ParameterClassifier | None = None
    kinds = {}
    for name, role in known.items():
        if role.kind == _LISTED.kind:
            classifier = classifier or ParameterClassifier(model.graph)
            role = classifier.role(model.graph.initializers[name])
        kinds[name] = role.kind
    return kinds


def _is_listed(model: ir.Model) -> bool:
    """Return whether the file lists its parameters and has all of them."""
    listed = _listed(model)
    return listed is not None and listed <= model.graph.initializers.keys()


def _listed(model: ir.Model, key: str = PARAMETERS) -> set[str] | None:
    """Return the parameters that the file lists, ``None`` without a list."""
    text = model.metadata_props.get(key)
    if text is None:
        return None
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PrepareError(
            f"the metadata {key!r} of the model is not valid JSON: {error}"
        ) from error
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise PrepareError(f"the metadata {key!r} of the model must be a list of names")
    return set(names)


def _is_state(role: Role) -> bool:
    """Return whether training updates tensors with this role."""
    return role.trains or role is STATISTIC


def _is_float(value: ir.Value) -> bool:
    tensor = tensor_of(value)
    return tensor is not None and tensor.dtype in _FLOATS


def _lift_weight(graph: ir.Graph, old: ir.Value, uses: Counter[str | None]) -> str:
    """Replace a hidden tensor by a new initializer; return its name."""
    tensor = tensor_of(old)
    assert tensor is not None
    node, base, n = old.producer(), old.name or "weight", 2
    home = old.graph if node is None else node.graph
    name = base
    if uses[base] > 1:  # two bodies may use the same name
        while uses[name]:
            name, n = f"{base}.{n}", n + 1
        uses[name] += 1
    new = ir.Value(
        name=name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(tensor.shape.numpy()),
        const_value=tensor,
    )
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if node is not None:
        assert isinstance(home, ir.Graph)
        old.name = f"{name}.lifted"
        home.remove(node, safe=True)
    elif isinstance(home, ir.Graph):
        home.initializers.pop(old.name or "", None)
    graph.register_initializer(new)
    return name
