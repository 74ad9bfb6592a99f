"""TRL's SFTTrainer and DPOTrainer train a language model file; ``make hugging-face`` has TRL."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxtrain
from onnxtrain.graph.io import load
from onnxtrain.text import without_cache
from tests.docs.blocks import blocks
from tests.text.models import llama

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None, reason="trl is not installed: make hugging-face"
    ),
    pytest.mark.filterwarnings("ignore"),
]
HEAD = "lm_head.MatMul.weight"
HIDDEN = "/model/layers.1/final_norm_layernorm/output_0"
VOCABULARY = 96


def of_the_page() -> Any:
    """Return the class that docs/hugging-face.md shows."""
    (code,) = (b.code for b in blocks("docs/hugging-face.md") if "class OnnxCausalLM" in b.code)
    assert len(code.strip().splitlines()) <= 40
    names: dict[str, Any] = {}
    exec(code, names)
    return names["OnnxCausalLM"]


def language_model(model: Any) -> tuple[Any, Any]:
    """Return the file as a language model of transformers, and a tokenizer of numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    width = int(onnxtrain.parameters(model, HEAD)[HEAD].shape[0])
    config = PretrainedConfig(vocab_size=VOCABULARY, hidden_size=width)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="0", eos_token="0", unk_token="0"
    )
    return of_the_page()(config, model, HIDDEN, HEAD), tokenizer


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "num_train_epochs": 4,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "logging_steps": 4,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        **more,
    }


def train(model: Any, folder: Path) -> tuple[Any, list[float]]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    first = np.random.default_rng(0).integers(1, 90, (32, 1))
    rows = Dataset.from_dict({"input_ids": ((first + np.arange(8)) % VOCABULARY).tolist()})
    wrapped, tokenizer = language_model(model)
    options = SFTConfig(**arguments(folder, dataset_kwargs={"skip_prepare_dataset": True}))
    trainer = SFTTrainer(
        model=wrapped, args=options, train_dataset=rows, processing_class=tokenizer
    )
    trainer.train()
    losses = [float(r["loss"]) for r in trainer.state.log_history if "loss" in r]
    return wrapped.model.net, losses


def test_sft_lowers_the_loss_of_a_float_decoder(tmp_path: Path) -> None:
    _, losses = train(without_cache(llama(layers=1, int4=False)), tmp_path)
    assert losses[-1] < 0.6 * losses[0]


def test_sft_of_adapters_leaves_the_base_as_it_is(tmp_path: Path) -> None:
    base = without_cache(llama(layers=1, int4=False))
    adapted = onnxtrain.lora(base, rank=4, targets=["*attn*", "*mlp*"])
    net, losses = train(adapted, tmp_path)
    assert losses[-1] < 0.8 * losses[0]
    assert [n for n, _ in net.named_parameters()] == list(adapted.names)
    net.to_onnx(tmp_path / "adapted.onnx")
    trained = load(tmp_path / "adapted.onnx").graph.initializers
    for name, x in base.graph.initializers.items():
        assert trained[name].const_value.tobytes() == x.const_value.tobytes(), name


def test_dpo_prefers_what_was_chosen(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    def text(numbers: Any) -> str:
        return "".join(f" {n}" for n in numbers)

    starts = np.random.default_rng(0).integers(10, 80, 32)
    rows = Dataset.from_dict(
        {
            "prompt": [text(range(s, s + 4)) for s in starts],
            "chosen": [text(range(s + 4, s + 8)) for s in starts],  # goes up
            "rejected": [text(range(s + 2, s - 2, -1)) for s in starts],
        }
    )
    base = without_cache(llama(layers=1, int4=False))
    adapted = onnxtrain.lora(base, rank=4, targets=["*attn*", "*mlp*"])
    wrapped, tokenizer = language_model(adapted)
    options = DPOConfig(**arguments(tmp_path, precompute_ref_log_probs=True))
    trainer = DPOTrainer(
        model=wrapped, args=options, train_dataset=rows, processing_class=tokenizer
    )
    trainer.train()
    logged = [r for r in trainer.state.log_history if "rewards/accuracies" in r]
    assert logged[0]["loss"] == pytest.approx(np.log(2), abs=0.1)
    assert logged[-1]["loss"] < 0.3
    assert logged[-1]["rewards/accuracies"] == 1
    wrapped.model.net.to_onnx(tmp_path / "adapted.onnx")
    trained = load(tmp_path / "adapted.onnx").graph.initializers
    for name, x in base.graph.initializers.items():
        assert trained[name].const_value.tobytes() == x.const_value.tobytes(), name
