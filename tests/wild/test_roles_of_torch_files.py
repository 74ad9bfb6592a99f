"""Files of torch's exporters, without a list of parameters: detection finds the same ones."""

from __future__ import annotations

import pytest

import onnxtrain
from tests.zoo.export import export
from tests.zoo.models import ZOO

NETS = (
    *("resnet", "mobilenet_v3", "unet", "vit", "swin", "bert", "gpt2", "llama", "mamba", "lstm"),
    *("diffusion_unet", "deepfm", "super_resolution", "nerf"),
)


@pytest.mark.parametrize("name", [n for n in NETS if n in ZOO])
def test_parameters_are_those_of_the_module(name: str):
    exported = export(ZOO[name], "eval")
    report = onnxtrain.explain(exported.model)
    unread = {n for n, why in report.frozen.items() if why == "no node reads it"}
    assert set(report.parameters) | unread == set(exported.names.values()) | unread


def test_there_are_enough_of_them():
    assert len([n for n in NETS if n in ZOO]) >= 10
