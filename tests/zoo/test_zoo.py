"""Parameter gradients of real architectures equal torch's."""

import pytest
from torch import nn

import onnxtrain

from .check import check
from .export import export
from .models import ZOO, ZooModel

# torch.cond looks at .grad of values inside when it is traced.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


def _runs():
    for entry in ZOO.values():
        for mode in entry.modes:
            # Dropout alone changes little in training mode; BatchNorm changes everything.
            quick = entry.fast and (mode == "eval" or entry.batch_norm)
            marks = () if quick else pytest.mark.full
            yield pytest.param(entry, mode, id=f"{entry.name}-{mode}", marks=marks)


@pytest.mark.parametrize(("entry", "mode"), list(_runs()))
def test_parameter_gradients_equal_torch(entry: ZooModel, mode: str):
    result = check(entry, mode)
    assert result.status == "pass", "\n".join(result.notes)
    assert result.nodes_backward > 0


@pytest.mark.parametrize("entry", list(ZOO.values()), ids=list(ZOO))
def test_flags_tell_the_truth(entry: ZooModel):
    module = entry.build()
    parts = list(module.modules())
    assert entry.batch_norm == any(
        isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts
    )
    assert entry.dropout == any(isinstance(part, nn.Dropout) and part.p for part in parts)
    assert sum(p.numel() for p in module.parameters()) < 20_000
    assert entry.static or all(draw.batched for draw in entry.draws)


@pytest.mark.parametrize("name", ["resnet", "gpt2", "gru"])
def test_default_parameters_are_torchs(name: str):
    """Without names every parameter is found, BatchNorm statistics and masks are not."""
    exported = export(ZOO[name])
    names = set(onnxtrain.parameters(exported.model))
    assert names == set(exported.names.values())


def test_same_seed_same_values():
    entry = ZOO["resnet"]
    first, second = entry.build(), entry.build()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert bool((a == b).all())
    assert bool((entry.inputs(4)[0] == entry.inputs(4)[0]).all())
