"""What torch calls a layer of a file: read from names of weights, biases, scopes and nodes."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import onnx_ir as ir

from onnxtrain.graph.nodes import is_op
from onnxtrain.graph.roles.names import is_automatic

_WEIGHT = re.compile(
    r"(\.(MatMul|Gemm|Gather))?\.(weight|kernel)(_(Q\d+(G\d+)?|quantized|Bnb4|DQ\w*|fp16|bf16))?$"
)
_SUFFIX = re.compile(r"_(Q\d+(G\d+)?|quantized|Bnb4)$")
_SCOPES = "pkg.torch.onnx.name_scopes"  # a list of module paths, in metadata of torch's exports
_OPERATOR = re.compile(r"^(node_)?(MatMul|Gemm|Gather|Conv|Fused\w+|Quant\w+)\w*$")
_BUILDER = re.compile(r"^(model\.layers\.\d+)\.attn\.")  # of onnxruntime-genai


def module_name(node: ir.Node, weights: Sequence[ir.Value], *, shared: bool = False) -> str:
    """Return the path of the torch module that a node computes, as well as the file tells it.

    Args:
        node: the product, convolution or look-up.
        weights: the initializers it reads.
        shared: the weights also serve another kind of layer, whose name they may have.
    """
    names = [x.name or "" for x in weights]
    by_weight = [_WEIGHT.sub("", n) for n in names[:1] if _WEIGHT.search(n)]
    named = [m for m in by_weight if not shared and not is_automatic(m)]
    candidates = [*named, *_scopes(node), *_bias_owner(node), *_node_path(node)]
    if not candidates:
        plain = [_SUFFIX.sub("", n) for n in names[:1] if not is_automatic(n)]
        candidates = [*by_weight, *plain, node.name or (node.outputs[0].name or "layer")]
    return as_in_torch(candidates[0])


def weight_module(weight: ir.Value) -> str:
    """Return the module that a stored weight belongs to, by its name."""
    return as_in_torch(_WEIGHT.sub("", weight.name or ""))


def as_in_torch(path: str) -> str:
    """Return a module path with the words of transformers where a builder has its own."""
    return _BUILDER.sub(r"\1.self_attn.", path)


def is_builders(weights: Sequence[ir.Value]) -> bool:
    """Return whether weights are named as onnxruntime-genai's builder does."""
    return any(".MatMul.weight" in (x.name or "") for x in weights)


def _scopes(node: ir.Node) -> list[str]:
    text = node.metadata_props.get(_SCOPES)
    if text is None:
        return []
    try:
        scopes = [str(s) for s in ast.literal_eval(text)]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [s for s in scopes[-2:-1] if s]


def _bias_owner(node: ir.Node) -> list[str]:
    """Return the module of a bias that the node or the sum behind it reads."""
    places = list(node.inputs[2:])
    if not is_op(node, "Conv", "Gemm"):
        behind = [u.node for u in node.outputs[0].uses() if is_op(u.node, "Add")]
        places = [x for n in behind for x in n.inputs]
    stored = [x for x in places if x is not None and x.is_initializer()]
    # Exporters store equal tensors once: a bias of many layers has the name of only one of them.
    names = [x.name or "" for x in stored if len(x.uses()) == 1]
    return [n.removesuffix(".bias") for n in names if n.endswith(".bias")]


def _node_path(node: ir.Node) -> list[str]:
    """Return the module of a node that is named by its scope: ``/model/layers.0/fc1/MatMul``."""
    parts = (node.name or "").strip("/").split("/")
    if len(parts) < 2 or not _OPERATOR.match(parts[-1]):
        return []
    return [".".join(parts[:-1])]


__all__ = ["as_in_torch", "is_builders", "module_name", "weight_module"]
