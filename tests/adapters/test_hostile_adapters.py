"""PEFT directories that are damaged or hostile raise named errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import onnxtrain
from onnxtrain.errors import CheckpointError, PrepareError
from tests.adapters.decoders import write

NAME = "base_model.model.model.layers.0.self_attn.q_proj"


class Directory:
    """A PEFT directory to damage, and the model that it is for."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model = write(folder).path
        self.folder = folder / "adapter"
        onnxtrain.lora(self.model, rank=4, targets="q_proj", **options).export_peft(self.folder)
        self.config = self.folder / "adapter_config.json"
        self.tensors = self.folder / "adapter_model.safetensors"

    def refused(self, message: str) -> None:
        with pytest.raises(CheckpointError, match=message):
            onnxtrain.load_adapter(self.model, self.folder)

    def set_config(self, **changes: object) -> None:
        config = json.loads(self.config.read_text())
        self.config.write_text(json.dumps({**config, **changes}))

    def set_tensors(self, **changes: np.ndarray) -> None:
        own = {f"{NAME}.{part}": a for part, a in changes.items()}
        save_file({**load_file(self.tensors), **own}, self.tensors)


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("lora_dropout", 2, r"dropout must be in \[0, 1\), got 2"),
        ("lora_dropout", -1, r"dropout must be in \[0, 1\)"),
        ("lora_dropout", float("nan"), r"dropout must be in \[0, 1\)"),
        ("lora_dropout", "0.1", r"dropout must be in \[0, 1\)"),
        ("lora_dropout", [0.1], r"dropout must be in \[0, 1\)"),
        ("lora_alpha", 1e39, "alpha must be positive and finite"),
        ("lora_alpha", float("inf"), "alpha must be positive and finite"),
        ("lora_alpha", -1, "alpha must be positive and finite"),
        ("lora_alpha", None, "alpha must be positive and finite"),
        ("lora_alpha", {}, "alpha must be positive and finite"),
        ("r", "8", "rank must be an integer"),
        ("r", 0, "rank must be at least 1"),
        ("r", 10**400, "rank must be at least 1"),
        ("alpha_pattern", [1], "alpha_pattern must map modules to numbers"),
        ("alpha_pattern", {"q_proj": "x"}, "alpha must be positive and finite"),
        ("alpha_pattern", {"(a+)+$": 1}, "alpha_pattern has the regular expression"),
        ("modules_to_save", "classifier", "modules_to_save must be a list of names"),
        ("modules_to_save", [1], "modules_to_save must be a list of names"),
        ("use_rslora", "yes", "use_rslora must be true or false"),
        ("peft_type", ["LORA"], "unsupported peft_type"),
    ],
)
def test_settings_that_peft_cannot_have_are_refused(
    directory: Directory, field: str, value: object, message: str
) -> None:
    directory.set_config(**{field: value})
    directory.refused(message)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"lora_A.weight": np.full((4, 64), np.nan, np.float32)}, "infinite or NaN"),
        ({"lora_B.weight": np.full((64, 4), np.inf, np.float32)}, "infinite or NaN"),
        ({"lora_B.weight": np.full((64, 4), 1e300)}, "infinite or NaN"),
        ({"lora_A.weight": np.array(1.0, np.float32)}, "the factors of .* have shapes"),
        ({"lora_A.weight": np.ones(4, np.float32)}, "the factors of .* have shapes"),
        ({"lora_A.weight": np.ones((0, 64), np.float32)}, "the factors of .* have shapes"),
        ({"lora_A.weight": np.ones((4, 64, 1), np.float32)}, "has shape"),
        ({"lora_embedding_A": np.ones((4, 64), np.float32)}, "two tensors lora_A"),
    ],
    ids=["nan", "inf", "overflow", "scalar", "vector", "rank 0", "3-D", "twice"],
)
def test_factors_that_no_layer_can_have_are_refused(
    directory: Directory, parts: dict[str, np.ndarray], message: str
) -> None:
    directory.set_tensors(**parts)
    directory.refused(message)


def test_two_adapters_for_one_layer_are_refused(directory: Directory) -> None:
    tensors = load_file(directory.tensors)
    other = {k.replace("model.model.model.", "model.model."): v for k, v in tensors.items()}
    save_file({**tensors, **other}, directory.tensors)
    directory.refused("two adapters for 'model.layers.0.self_attn.q_proj'")


def test_magnitudes_fit_the_layer(tmp_path: Path) -> None:
    directory = Directory(tmp_path, dora=True)
    directory.set_tensors(**{"lora_magnitude_vector": np.ones(3, np.float32)})
    directory.refused("has 3 magnitudes, expected 64")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_pipes_and_devices_are_not_adapters(directory: Directory, name: str) -> None:
    path = directory.folder / name
    path.unlink()
    os.mkfifo(path)
    directory.refused("not a regular file")
    path.unlink()
    path.symlink_to("/dev/zero")
    directory.refused("not a regular file")


def test_a_pipe_as_config_of_the_model_does_not_hang(directory: Directory) -> None:
    for name in ("config.json", "genai_config.json"):
        config = directory.model.with_name(name)
        config.unlink(missing_ok=True)
        os.mkfifo(config)
    assert onnxtrain.load_adapter(directory.model, directory.folder).family is None


def test_deeply_nested_settings_are_refused(directory: Directory) -> None:
    directory.config.write_text("[" * 100_000)
    directory.refused("is damaged: it is nested too deeply")


def test_the_first_alpha_pattern_that_matches_holds(directory: Directory) -> None:
    directory.set_config(alpha_pattern={"0.self_attn.q_proj": 6, "q_proj": 2})
    adapters = onnxtrain.load_adapter(directory.model, directory.folder).adapters
    assert [a.alpha for a in adapters] == [6.0, *[2.0] * (len(adapters) - 1)]


def test_lora_refuses_an_alpha_that_overflows_float32(directory: Directory) -> None:
    with pytest.raises(PrepareError, match="alpha must be positive and finite"):
        onnxtrain.lora(directory.model, alpha=1e39)
