"""Small transformers models by optimum-onnx, and as onnxruntime's own optimizer fuses them.

Runs in a venv of its own: optimum wants an older transformers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import transformers
from optimum.exporters.onnx import onnx_export_from_model
from sizes import OPTIMUM as SIZES
from sizes import OPTIMUM_MODELS as MODELS

FUSED = {"bert": "bert", "distilbert": "bert", "roberta": "bert", "gpt2": "gpt2", "vit": "vit"}


def made(folder: Path, name: str) -> None:
    """Write one model."""
    config, kind, task = MODELS[name]
    settings = getattr(transformers, config)
    own = set(settings().to_dict())
    torch.manual_seed(0)
    model = getattr(transformers, kind)(settings(**{k: v for k, v in SIZES.items() if k in own}))
    with tempfile.TemporaryDirectory() as temporary:
        onnx_export_from_model(
            model.eval(), temporary, task=task, do_validation=False, no_post_process=True
        )
        for path in sorted(Path(temporary).glob("*.onnx")):
            plain = path.stem == "model"
            path.rename(folder / f"{name}{'' if plain else '-' + path.stem}.onnx")


def fused(folder: Path, name: str) -> None:
    """Write what onnxruntime.transformers makes of it."""
    from onnxruntime.transformers import optimizer

    for level in (0, 1):
        better = optimizer.optimize_model(
            str(folder / f"{name}.onnx"),
            model_type=FUSED[name],
            num_heads=4,
            hidden_size=32,
            opt_level=level,
            use_gpu=False,
        )
        better.save_model_to_file(str(folder / f"{name}-fused{level}.onnx"))


def main(folder: Path) -> None:
    """Write all of them; say what cannot be made."""
    for name in MODELS:
        for work in (made, fused) if name in FUSED else (made,):
            try:
                work(folder, name)
            except Exception as error:  # a tool that fails on one model still makes the others
                print(f"not made: {name}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            else:
                print(f"{name} {work.__name__}: made", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
