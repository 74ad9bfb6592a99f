"""Small language models by onnxruntime-genai's builder. Runs in the producers' venv."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import shutil
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import onnxruntime_genai
import tokenizers
import torch
import transformers

BUILDER = Path(onnxruntime_genai.__file__).parent / "models" / "builder.py"
FORK = multiprocessing.get_context("fork")
"""Importing what the builder needs takes longer than building: its processes begin with that."""
COMMON = {
    # No other layer may be as wide: the builder knows the head by its width.
    "vocab_size": 112,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "phi": "Phi",
    "phi3": "Phi3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "granite": "Granite",
    "olmo": "Olmo",
    "nemotron": "Nemotron",
    "smollm3": "SmolLM3",
    "ernie": "Ernie4_5",
    "hunyuan": "HunYuanDenseV1",
    "lfm2": "Lfm2",
    "granitehybrid": "GraniteMoeHybrid",
}
OWN = {
    # Rotations of half a head want heads twice as long.
    "phi": {"hidden_size": 128, "head_dim": 32, "vocab_size": 160},
    "nemotron": {"hidden_size": 128, "head_dim": 32, "vocab_size": 160},
    # The builder takes any layer for the head that has as many outputs as there are words.
    "phi3": {"vocab_size": 160},
    "ernie": {"vocab_size": 160},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "granitehybrid": {
        "layer_types": ["attention", "attention"],
        "shared_intermediate_size": 96,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
}
"""Settings of a family besides those of `COMMON`."""
PRECISIONS = ("fp32", "fp16", "int4")


def checkpoint(folder: Path, name: str) -> None:
    """Write a transformers model of random weights and a tokenizer of a few words."""
    prefix = FAMILIES[name]
    suffix = "TextConfig" if name == "gemma3" else "Config"
    settings = getattr(transformers, prefix + suffix)
    own = set(settings().to_dict()) | {"head_dim", "original_max_position_embeddings"}
    sizes = {**COMMON, **OWN.get(name, {})}
    config = settings(**{k: v for k, v in sizes.items() if k in own})
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(COMMON["vocab_size"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="w1", eos_token="w2", pad_token="w0", unk_token="w3"
    )
    fast.save_pretrained(folder)


def built(source: Path, folder: Path, name: str, precision: str) -> str:
    """Run the builder, unless it has made this one; return why it failed."""
    if (folder / name).exists():
        return ""
    part = folder.parents[1] / "genai-part"  # half a model is not taken for one
    shutil.rmtree(part, ignore_errors=True)
    words = [str(BUILDER), "-i", str(source), "-o", str(part), "-p", precision, "-e", "cpu"]
    words += ["-c", str(folder.parent / "hf")]
    answer, given = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_build, args=(words, given))
    process.start()
    given.close()
    try:
        why = answer.recv()
    except EOFError:
        process.join()
        why = f"exit status {process.exitcode}"
    process.join()
    if not why:
        part.rename(folder / name)
    return why


def _build(words: list[str], given: Connection) -> None:
    """Run the builder's command in this process, and send why it failed."""
    sys.argv = words
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # bars of progress, a line for each tensor
        os.dup2(nowhere.fileno(), 2)
    try:
        runpy.run_path(str(BUILDER), run_name="__main__")
    except BaseException as error:  # the builder's answer, whatever it is, also when it exits
        given.send(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
    else:
        given.send("")


def main(folder: Path, names: list[str]) -> None:
    """Write what can be made; say what cannot."""
    torch.set_num_threads(1)  # processes that are forked have no others
    sys.path.insert(0, str(BUILDER.parent))
    importlib.import_module("builder")
    for name in names or FAMILIES:
        source = folder.parent / "checkpoints" / name
        if not (source / "config.json").exists():
            source.mkdir(parents=True, exist_ok=True)
            try:
                checkpoint(source, name)
            except Exception as error:  # a tool that fails on one model still makes the others
                print(f"not made: {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
        for precision in PRECISIONS:
            why = built(source, folder, f"{name}-{precision}", precision)
            label = f"{name}-{precision}"
            print(f"not made: {label}: {why}" if why else f"{label}: made", flush=True)
        (source / "done.json").write_text(json.dumps({"family": name}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
