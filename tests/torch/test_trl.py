"""TRL's SFTTrainer trains a language model file; ``make hugging-face`` has TRL."""

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


def train(model: Any, folder: Path) -> tuple[Any, list[float]]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PretrainedConfig, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    width = int(onnxtrain.parameters(model, HEAD)[HEAD].shape[0])
    config = PretrainedConfig(vocab_size=VOCABULARY, hidden_size=width)
    words = models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="0", eos_token="0", unk_token="0"
    )
    first = np.random.default_rng(0).integers(1, 90, (32, 1))
    rows = Dataset.from_dict({"input_ids": ((first + np.arange(8)) % VOCABULARY).tolist()})
    arguments = SFTConfig(
        output_dir=str(folder),
        num_train_epochs=4,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=4,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    language_model = of_the_page()(config, model, HIDDEN, HEAD)
    trainer = SFTTrainer(
        model=language_model, args=arguments, train_dataset=rows, processing_class=tokenizer
    )
    trainer.train()
    losses = [float(r["loss"]) for r in trainer.state.log_history if "loss" in r]
    return language_model.model.net, losses


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
