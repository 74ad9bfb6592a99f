"""What the name of a tensor tells: torch's names of parameters, exporters' names of numbers."""

from __future__ import annotations

import re

_AUTOMATIC = re.compile(
    r"^(\d+|_?v_\d+|val_\d+|onnx::.*|lifted_tensor_\d+|c?_?(lifted_)?tensor_constant\d*"
    r"|_constants?_?\d*|const(ant)?[._]?\d*|auto_.*|prepare/.*|scalar_tensor.*|fill\w*_?\d*"
    r"|const_fold_opt__\d+|\w*tmp_\d+)$"
    r"|_output_\d+$|(^|/)[Cc]onst(ant)?(_\d+)?(:\d+)?$|/(mul|add|sub|truediv|Pow|pow|Maximum)/[xy](:\d+)?$"
)
_CONSTANT = re.compile(
    r"(^|[._/])(inv_freqs?|(cos|sin)(_|s_)?(cached?|table)?|freqs?_(cis|cos|sin)|rotary_emb\w*|rope\w*"
    r"|sinusoid\w*|forward_basis_buffer|inverse_basis_buffer|\w*_buffer|mel_(basis|filters?|fb|weights?)"
    r"|melW|fbank|filter_?banks?|mel_scale|dft\w*|\w*hann\w*|hamming\w*|(stft_?)?window"
    r"|anchors?(_points|_grid)?|strides?_tensor|(attn|attention|causal|src|tgt)_?mask)$"
)
_STATISTIC = re.compile(r"(^|[._/])(running|moving|batch_norm)_?(mean|var\w*)(:\d+)?$", re.I)
_LEARNED_SCALAR = re.compile(
    r"(^|[._/])(logit_(scale|bias)|temperature|\w+_(scale|gain)|\w+\.[wb]_\d+(_deepcopy_\d+)?)$"
)
_LEARNED_PLACE = re.compile(  # words that exporters also give to the arguments of a function
    r"[._/](scale\d*|gain|gamma\d*|beta|alpha|weight|bias|temp|slope|gate|g|lambda\d*)$"
)
_LEARNED_VECTOR = re.compile(r"^(scale|gain|gamma|layer_scale|bias|weight)\d*$")


def is_automatic(name: str) -> bool:
    """Return whether an exporter or optimiser made the name up: it tells nothing of the tensor."""
    return _AUTOMATIC.search(name) is not None


def names_constant(name: str) -> bool:
    """Return whether people give the name to tables that do not train: ``rotary.inv_freq``."""
    return _CONSTANT.search(name) is not None


def names_statistic(name: str) -> bool:
    """Return whether the name is that of a running mean or variance."""
    return _STATISTIC.search(name) is not None


def names_scalar_parameter(name: str, rank: int) -> bool:
    """Return whether the name is one that people give to a single number that trains."""
    if is_automatic(name):
        return False
    patterns = [_LEARNED_SCALAR, _LEARNED_PLACE, *([_LEARNED_VECTOR] if rank else [])]
    return any(pattern.search(name) is not None for pattern in patterns)
