"""Mixture of experts in dense form: every expert computes every token."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.expand.expansions import TRAINING, expansion, raise_unsupported
from onnxtrain.expand.quantized import PackedFormat, dequantize_packed
from onnxtrain.graph.builder import OpBuilder


@expansion("com.microsoft::MoE", when=TRAINING)
def moe(
    op,
    x,
    router,
    w1,
    b1,
    w2,
    b2=None,
    w3=None,
    b3=None,
    *,
    k=1,
    activation_type="relu",
    activation_alpha=1.0,
    activation_beta=0.0,
    normalize_routing_weights=0,
    swiglu_fusion=0,
    swiglu_limit=None,
    use_sparse_mixer=0,
    node,
):
    """``sum_e p_e W2 act(W1 x)`` over the ``k`` experts with the largest probabilities."""
    if use_sparse_mixer:
        raise_unsupported(node, "sparse mixers are not supported")
    layers = _ExpertWeights(w1, b1, w2, b2, w3, b3)
    act = _Activation(
        activation_type, activation_alpha, activation_beta, swiglu_fusion, swiglu_limit
    )
    return _mixture_of_experts(op, x, router, None, layers, act, k, normalize_routing_weights, node)


@expansion("com.microsoft::QMoE", when=TRAINING)
def q_moe(
    op,
    x,
    router,
    w1,
    s1,
    b1,
    w2,
    s2,
    b2=None,
    w3=None,
    s3=None,
    b3=None,
    z1=None,
    z2=None,
    z3=None,
    router_weights=None,
    *more,
    k=1,
    activation_type="relu",
    activation_alpha=1.0,
    activation_beta=0.0,
    normalize_routing_weights=0,
    swiglu_fusion=0,
    swiglu_limit=None,
    use_sparse_mixer=0,
    expert_weight_bits=4,
    fc1_expert_weight_bits=None,
    fc2_expert_weight_bits=None,
    fc3_expert_weight_bits=None,
    block_size=0,
    quant_type="int",
    weights_prepacked=-1,
    accuracy_level=0,
    node,
):
    """MoE with quantized weights, which are constant and stay packed.

    Without ``router_weights`` the routing weights are normalized, whatever the attribute says: the
    CPU kernel takes the softmax over the selected experts only.
    """
    if use_sparse_mixer or quant_type != "int" or weights_prepacked > 0:
        raise_unsupported(
            node,
            "sparse mixers, non-integer weights and prepacked weights are not supported",
        )

    def layer(w: Any, s: Any, z: Any, bits: int | None) -> ir.Value | None:
        if w is None:
            return None
        packed = PackedFormat(bits or expert_weight_bits, block_size or None)
        return dequantize_packed(op, w, s, z, packed, node)

    layers = _ExpertWeights(
        layer(w1, s1, z1, fc1_expert_weight_bits),
        b1,
        layer(w2, s2, z2, fc2_expert_weight_bits),
        b2,
        layer(w3, s3, z3, fc3_expert_weight_bits),
        b3,
    )
    act = _Activation(
        activation_type, activation_alpha, activation_beta, swiglu_fusion, swiglu_limit
    )
    normalise = normalize_routing_weights if router_weights is not None else 1
    return _mixture_of_experts(op, x, router, router_weights, layers, act, k, normalise, node)


class _ExpertWeights:
    def __init__(self, w1: Any, b1: Any, w2: Any, b2: Any, w3: Any, b3: Any) -> None:
        self.w1, self.b1, self.w2, self.b2, self.w3, self.b3 = w1, b1, w2, b2, w3, b3


class _Activation:
    def __init__(
        self, kind: str, alpha: float, beta: float, fusion: int, limit: float | None
    ) -> None:
        self.kind, self.alpha, self.beta = kind, alpha, beta
        self.fusion, self.limit = fusion, limit


def _mixture_of_experts(
    op: OpBuilder,
    x: ir.Value,
    router: ir.Value,
    weights: ir.Value | None,
    layers: _ExpertWeights,
    act: _Activation,
    k: int,
    normalise: int,
    node: ir.Node,
) -> ir.Value:
    experts = op.dims(router)[-1]
    if not isinstance(experts, int):
        raise_unsupported(node, "the number of experts must be static")
    tokens = op.Reshape(x, op.vector([-1, op.size(x, -1)])) if op.rank(x) == 3 else x
    chosen = _top_k_routing(op, router, weights, k, experts, normalise)  # [T, E]
    inner = _linear(op, op.Unsqueeze(tokens, [0]), layers.w1, layers.b1)  # [E, T, I]
    if act.kind == "swiglu":
        inner = _swiglu(op, inner, tokens, layers, act)
    else:
        inner = _activate(op, inner, act.kind, node)
        if layers.w3 is not None:
            gate = _linear(op, op.Unsqueeze(tokens, [0]), layers.w3, layers.b3)
            inner = op.Mul(inner, gate)
    outer = _linear(op, inner, layers.w2, layers.b2)  # [E, T, H]
    share = op.Unsqueeze(op.Transpose(chosen, perm=[1, 0]), [2])
    y = op.ReduceSum(op.Mul(outer, share), [0], keepdims=0)
    return op.reshape_like(y, x)


def _top_k_routing(
    op: OpBuilder, router: ir.Value, weights: ir.Value | None, k: int, experts: int, normalise: int
) -> ir.Value:
    """Return the routing weights, zero except for the ``k`` best experts of each token."""
    _, best = op.TopK(router, op.const([k]), axis=-1, _outputs=2)
    hot = op.OneHot(best, op.const(experts), op.const([0.0, 1.0]), axis=-1)
    mask = op.cast(op.ReduceSum(hot, [1], keepdims=0), router.dtype)
    share = op.Softmax(router, axis=-1) if weights is None else weights
    chosen = op.Mul(share, mask)
    chosen.shape = router.shape
    if normalise:
        chosen = op.Div(chosen, op.ReduceSum(chosen, [1], keepdims=1))
    return chosen


def _linear(op: OpBuilder, x: ir.Value, w: ir.Value, b: ir.Value | None) -> ir.Value:
    y = op.MatMul(x, op.Transpose(w, perm=[0, 2, 1]))
    return y if b is None else op.Add(y, op.Unsqueeze(b, [1]))


def _swiglu(
    op: OpBuilder, inner: ir.Value, tokens: ir.Value, layers: _ExpertWeights, act: _Activation
) -> ir.Value:
    if act.fusion == 1:  # gate and linear part alternate
        pairs = op.Reshape(inner, [0, 0, -1, 2])
        g, l = (op.Gather(pairs, op.const(i), axis=3) for i in (0, 1))  # noqa: E741
    elif act.fusion == 2:
        g, l = op.Split(inner, axis=-1, num_outputs=2, _outputs=2)  # noqa: E741
    else:
        g, l = inner, _linear(op, op.Unsqueeze(tokens, [0]), layers.w3, layers.b3)  # noqa: E741
    if act.limit is not None:
        g = op.Min(g, op.const(act.limit, g.dtype))
        l = op.Clip(l, -act.limit, act.limit)  # noqa: E741
    opened = op.Mul(g, op.Sigmoid(op.Mul(g, act.alpha)))
    return op.Mul(opened, op.Add(l, act.beta))


def _activate(op: OpBuilder, x: ir.Value, kind: str, node: ir.Node) -> ir.Value:
    if kind == "relu":
        return op.Relu(x)
    if kind == "gelu":
        return op.Gelu(x, approximate="tanh")
    if kind == "silu":
        return op.Mul(x, op.Sigmoid(x))
    if kind == "identity":
        return x
    raise_unsupported(node, f"unknown activation {kind!r}")
