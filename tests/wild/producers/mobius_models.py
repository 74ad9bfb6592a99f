"""Small models of many types by mobius-onnx, with random weights. Runs in the producers' venv."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import mobius
import numpy as np
import onnx_ir as ir
import transformers
from sizes import MOBIUS as SIZES

ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
OWN = {
    # They turn a share of each head, and onnxruntime wants tables with a multiple of 8 columns.
    **dict.fromkeys(("gpt_neox", "persimmon", "phi"), ONE_HEAD),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    "yolos": {"image_size": [32, 32], "num_detection_tokens": 6},
}
"""Sizes that a model type has in a form of its own."""
WEIGHTS = {"t5": 0.1, "mt5": 0.1}
"""Their scores are not divided by the root of a head's size: large weights make them jump."""
ONE_TOKEN = {"mamba"}
"""Their graphs squeeze the axis of tokens away: they take one at a time, and inputs say so."""
TYPES = """
llama mistral qwen2 qwen3 phi phi3 gemma gemma2 gemma3_text gpt2 gpt_neox gptj opt olmo
olmo2 granite cohere cohere2 stablelm starcoder2 smollm3 ernie4_5 nemotron bloom falcon
mpt codegen gpt_neo mixtral olmoe phimoe qwen2_moe qwen3_moe granitemoe internlm2 exaone4
glm glm4 helium arcee seed_oss hunyuan_v1_dense apertus bert roberta albert distilbert
electra xlm-roberta camembert mpnet deberta-v2 roformer modernbert vit deit beit dinov2
swin bart t5 mt5 marian pegasus mbart wav2vec2 hubert whisper mamba xglm biogpt persimmon
ctrl gpt_bigcode jais2 dots1 ministral lfm2 rembert nystromformer megatron-bert convbert
squeezebert yolos clip_vision_model siglip_vision_model
"""


def made(kind: str) -> mobius.ModelPackage:
    """Return the package of one model type."""
    hf = transformers.CONFIG_MAPPING[kind]
    own = set(hf().to_dict())
    sizes = {**SIZES, **OWN.get(kind, {})}
    config = hf(**{k: v for k, v in sizes.items() if k in own})
    net = mobius.registry.get(kind)
    reading = getattr(net, "config_class", None) or mobius.registry.get_config_class(kind)
    settings = (reading or mobius.ArchitectureConfig).from_transformers(config)
    if getattr(settings, "type_vocab_size", None) == 0:  # the graph asks for types all the same
        settings.type_vocab_size = SIZES["type_vocab_size"]
    task = mobius.registry.get_task(kind) or getattr(net, "default_task", "text-generation")
    return mobius.build_from_module(net(settings), settings, task, execution_provider="cpu")


def fill(model: ir.Model, rng: np.random.Generator, size: float) -> None:
    """Give every weight without values some; ``size`` is that of matrices."""
    for name, x in model.graph.initializers.items():
        if x.const_value is not None and not _is_blank(x.const_value):
            continue
        dims = tuple(int(d) for d in x.shape)
        norm = "norm" in name.lower() and name.endswith("weight")
        array = rng.standard_normal(dims) * (size if len(dims) > 1 else 0.05) + norm
        dtype = x.dtype or ir.DataType.FLOAT
        x.const_value = ir.Tensor(array.astype(dtype.numpy()), name=name)


def _is_blank(tensor: ir.TensorProtocol) -> bool:
    """Return whether values are still to come: a tensor of zeros has no direction."""
    if isinstance(tensor, ir.LazyTensor):
        return True
    return tensor.dtype.is_floating_point() and tensor.size > 1 and not tensor.numpy().any()


def main(folder: Path, kinds: list[str]) -> None:
    """Write what can be made; say what cannot."""
    for kind in kinds or TYPES.split():
        try:
            package = made(kind)
            for part, model in package.items():
                fill(model, np.random.default_rng(0), WEIGHTS.get(kind, 0.3))
                if kind in ONE_TOKEN:
                    model.graph.inputs[0].shape = ir.Shape(["batch", 1])
                suffix = "" if len(package) == 1 else f"-{part}"
                ir.save(model, folder / f"{kind}{suffix}.onnx")
        except Exception as error:  # a tool that fails on one model still makes the others
            print(f"not made: {kind}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            if len(kinds) == 1:
                traceback.print_exc()
        else:
            print(f"{kind}: made", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
