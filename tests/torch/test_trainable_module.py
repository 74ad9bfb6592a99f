"""A module on two ONNX sessions does what the module does in torch."""

# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onnxtrain.errors import OnnxTrainError
from onnxtrain.torch import TrainableModule

from .modules import CASES, Case, Cnn, Mlp

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def wrap(module: nn.Module, **options: Any) -> TrainableModule:
    """Wrap a copy, so that the module itself stays torch's."""
    return TrainableModule(copy.deepcopy(module), threads=1, **options)


def close(a: Tensor | None, b: Tensor | None, name: str = "") -> None:
    if b is None:
        assert a is None or not a.any(), name
        return
    assert a is not None, name
    # A bias in front of a normalisation has the gradient 0; torch's own rounding is 1.2e-5 there.
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, msg=lambda m: f"{name}: {m}")


def loss_of(outputs: Any) -> Tensor:
    """Contract every float output with fixed weights."""
    total = torch.zeros(())
    for i, y in enumerate(pytree.tree_leaves(outputs)):
        if isinstance(y, Tensor) and y.is_floating_point() and y.requires_grad:
            g = torch.Generator().manual_seed(i)
            total = total + (y * torch.randn(y.shape, generator=g, dtype=y.dtype)).sum()
    return total


def same(ours: nn.Module, theirs: nn.Module, case: Case, rows: int, seed: int) -> None:
    a, b = case.inputs(rows, seed), case.inputs(rows, seed)
    got, want = ours(*a, **case.kwargs), theirs(*b, **case.kwargs)
    leaves, structure = pytree.tree_flatten(got)
    expected, wanted = pytree.tree_flatten(want)
    assert structure == wanted
    for i, (x, y) in enumerate(zip(leaves, expected, strict=True)):
        if isinstance(y, Tensor):
            assert x.dtype == y.dtype
            close(x.detach(), y.detach(), f"output {i}")
        else:
            assert x == y
    ours.zero_grad()
    theirs.zero_grad()
    loss_of(got).backward()
    loss_of(want).backward()
    for (name, p), (other, q) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other
        close(p.grad, q.grad, name)
    for (name, p), q in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        close(p, q, name)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        close(x.grad, y.grad, f"input {i}")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if c.quick else pytest.mark.full) for n, c in CASES.items()]
)
def test_equals_torch(name: str) -> None:
    case = CASES[name]
    module = case.build()
    ours, theirs = wrap(module), module
    same(ours, theirs, case, rows=3, seed=0)
    same(ours, theirs, case, rows=4, seed=1)
    assert sum(len(calls) for calls in ours._compiled_calls.values() if calls) == 1


def test_there_are_enough_modules() -> None:
    assert len(CASES) >= 25


@pytest.fixture(scope="module")
def pair() -> tuple[TrainableModule, nn.Module]:
    """An MLP, exported once for training; tests leave its values as they are."""
    module = CASES["mlp"].build()
    ours = wrap(module)
    ours(torch.randn(2, 6))
    return ours, module


@pytest.fixture
def mlp(pair):
    ours, theirs = pair
    state = copy.deepcopy(theirs.state_dict())
    ours.zero_grad()
    theirs.zero_grad()
    yield ours, theirs
    ours.load_state_dict(state)
    theirs.load_state_dict(state)


def test_several_forwards_before_a_backward(mlp) -> None:
    ours, theirs = mlp
    batches = [torch.randn(n, 6) for n in (2, 5, 3)]
    for module in (ours, theirs):
        first, second, third = (module(x) for x in batches)
        (third.square().sum() + first.sum()).backward()
        second.exp().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        close(p.grad, q.grad, name)


def test_behind_another_layer() -> None:
    """The input is not a leaf: one use, several uses in one graph, no_grad; each kind first."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
    for ours in (wrap(second), wrap(second)):
        results = []
        for part in (ours, second):
            first.zero_grad()
            part.zero_grad()
            hidden = first(torch.arange(12.0).reshape(3, 4) / 12)
            (part(part(hidden)) * part(hidden)).sum().backward()
            results.append([p.grad.clone() for p in (*first.parameters(), *part.parameters())])
        for p, q in zip(*results, strict=True):
            close(p, q)
        with torch.no_grad():
            close(ours(first(torch.ones(2, 4))), second(first(torch.ones(2, 4))))
    frozen = wrap(second).requires_grad_(False)
    first.zero_grad()
    frozen(first(torch.ones(2, 4))).sum().backward()
    expected = torch.autograd.grad(second(first(torch.ones(2, 4))).sum(), first.weight)
    close(first.weight.grad, expected[0])


class Shifted(nn.Module):
    """Changes its first input, which the second result is computed from, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.fc(x.clone()).tanh()
        x[rows] = y[rows] * x[rows]
        return x, x.exp()


@pytest.mark.parametrize("before", [None, nn.Linear(3, 3)], ids=["data", "hidden"])
def test_a_module_that_changes_its_input(before) -> None:
    theirs, rows = Shifted(), torch.tensor([2, 0])
    ours = TrainableModule(copy.deepcopy(theirs))
    found = []
    for module in (ours, theirs):
        torch.manual_seed(3)
        values = []
        for batch in (4, 5, 4):
            x = torch.randn(batch, 3)
            hidden = x if before is None else before(x)
            y, z = module(hidden, rows)
            (y.square().sum() + (z * hidden).sum()).backward()  # reads the changed input
            values += [y, z, hidden]
        parameters = [*module.parameters(), *(before.parameters() if before else ())]
        found.append([*values, *(p.grad.clone() for p in parameters)])
        if before:
            before.zero_grad()
    for a, b in zip(*found, strict=True):
        close(a, b)
        assert a.requires_grad == b.requires_grad


def test_a_leaf_is_not_changed_in_place() -> None:
    ours = TrainableModule(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        ours(torch.randn(2, 3, requires_grad=True))


class Counting(nn.Module):
    """Changes its buffers: one is replaced, one changes in place and is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        y = self.fc(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y / self.steps


def test_buffers_that_a_module_changes() -> None:
    theirs = Counting()
    ours = TrainableModule(copy.deepcopy(theirs))
    for batch in (4, 5, 4):
        x = torch.randn(batch, 3)
        for module in (ours, theirs):
            module(x).square().sum().backward()
        close(ours(x), theirs(x))
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        close(a, b)
    close(ours.fc.weight.grad, theirs.fc.weight.grad)
    with torch.no_grad():
        close(ours.eval()(x), theirs.eval()(x))
    assert ours.steps == theirs.steps == 7


def test_buffers_that_cannot_be_exported_are_named() -> None:
    norm = nn.InstanceNorm1d(3, track_running_stats=True)
    with pytest.raises(OnnxTrainError, match=r"InstanceNorm1d changes its buffers .*running_mean"):
        TrainableModule(norm)(torch.randn(2, 3, 4))


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        self.penalty = y.square().mean()
        return y


def test_attributes_set_in_forward_are_named(caplog) -> None:
    TrainableModule(Remembering())(torch.randn(2, 3))
    assert "Remembering sets attributes in forward that are not computed" in caplog.text
    assert "penalty; return them" in caplog.text


class Opaque:
    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


class Extras(nn.Module):
    """Returns values other than tensors, as ``extra`` computes them."""

    def __init__(self, extra) -> None:
        super().__init__()
        self.fc, self.extra = nn.Linear(3, 2), extra

    def forward(self, x: torch.Tensor) -> tuple:
        y = self.fc(x)
        return y, self.extra(y)


def test_results_that_are_constants_come_back() -> None:
    constants = [None, 0.5, 3, True, "mean", torch.float32]
    ours = TrainableModule(Extras(lambda y: constants))
    assert ours(torch.randn(2, 3))[1] == constants
    assert ours(torch.randn(4, 3))[1] == constants


def test_an_object_with_tensors_is_not_returned_again() -> None:
    y, extra = TrainableModule(Extras(Opaque))(torch.ones(2, 3))
    assert y.shape == (2, 2)
    with pytest.raises(OnnxTrainError, match=r"Extras returns a Opaque, whose 'values' is not"):
        extra.values.sum()


@pytest.mark.parametrize(
    "extra",
    [lambda y: len(y), lambda y: y.detach().mean().item(), lambda y: bool(y.detach().max() > 0)],
    ids=["size", "value", "flag"],
)
def test_a_number_that_depends_on_inputs_is_refused(extra) -> None:
    ours = TrainableModule(Extras(extra))
    torch.nn.init.ones_(ours.fc.weight)
    torch.nn.init.constant_(ours.fc.bias, -2.0)
    with pytest.raises(OnnxTrainError, match="Extras returns a number that depends on its inputs"):
        ours(torch.ones(2, 3))


def test_gradients_accumulate_and_backward_twice(mlp) -> None:
    ours, theirs = mlp
    x = torch.randn(4, 6)
    for module in (ours, theirs):
        loss = module(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(p.grad, q.grad)


def test_changes_in_place_are_noticed(mlp) -> None:
    ours, _ = mlp
    y = ours(torch.randn(3, 6))
    with torch.no_grad():
        ours.fc2.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_no_second_derivative(mlp) -> None:
    ours, _ = mlp
    loss = ours(torch.randn(3, 6)).square().sum()
    with pytest.raises(OnnxTrainError, match="cannot be differentiated again"):
        torch.autograd.grad(loss, list(ours.parameters()), create_graph=True)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LBFGS"])
def test_torch_optimizers(mlp, name: str) -> None:
    ours, theirs = mlp
    g = torch.Generator().manual_seed(3)
    x, labels = torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g)
    for module in (ours, theirs):
        optimizer = getattr(torch.optim, name)(module.parameters(), lr=0.05)

        def closure(module=module, optimizer=optimizer):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(x), labels)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    for (key, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}")


def test_state_dict_has_the_names_of_the_module(mlp) -> None:
    ours, theirs = mlp
    assert list(ours.state_dict()) == list(theirs.state_dict())
    outer = nn.Sequential(ours)
    assert list(outer.state_dict()) == [f"0.{n}" for n in theirs.state_dict()]
    other = {f"0.{n}": torch.zeros_like(t) for n, t in theirs.state_dict().items()}
    outer.load_state_dict(other)
    assert not any(p.any() for p in ours.parameters())
    missing, extra = ours.load_state_dict(
        {"fc1.weight": torch.ones(8, 6), "x": torch.ones(1)}, strict=False
    )
    assert "fc2.bias" in "".join(missing)
    assert "x" in "".join(extra)
    assert ours.fc1.weight.eq(1).all()


def test_copies(mlp) -> None:
    ours, theirs = mlp
    x = torch.randn(3, 6)
    twin, back = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))
    for other in (twin, back):
        assert isinstance(other, TrainableModule)
        assert other.fc1.weight is not ours.fc1.weight
        assert other._compiled_calls == {}
        assert list(other.state_dict()) == list(theirs.state_dict())
        assert other.threads == 1
    with torch.no_grad():
        close(back(x), theirs(x))


def test_modes_and_frozen_parts() -> None:
    """Evaluation, no_grad, a part in another mode, frozen parameters: each is noticed."""
    theirs = Case(Cnn, ()).build()
    ours = wrap(theirs)
    x = torch.randn(4, 2, 6, 6)
    for module in (ours, theirs):
        module.norm.eval()
        module.conv.requires_grad_(False)
        module(x).square().sum().backward()
    before = theirs.norm.running_mean.clone()
    for (name, p), q in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None), name
        close(p.grad, q[1].grad, name)
    close(ours.norm.running_mean, before)
    ours.eval()
    theirs.eval()
    with torch.no_grad():
        y = ours(x)
        assert not y.requires_grad
        close(y, theirs(x))
    assert not ours.training
    assert not ours.module.training
    assert len(ours._compiled_calls) == 2


def test_changed_inputs_are_exported_again() -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    ours = wrap(theirs)
    with torch.no_grad():
        for shape in ((2, 4), (2, 3, 4), (2, 6, 4), (3, 7, 4)):
            x = torch.randn(shape)
            close(ours(x), theirs(x))
        assert [len(p) for p in ours._compiled_calls.values()] == [1, 2]


class Sorted(nn.Module):
    """Reads values of a tensor and counts its calls in Python, which no graph can."""

    calls = itertools.count(1)

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (len(set(x.flatten().tolist())) + next(self.calls))


def test_what_cannot_be_exported() -> None:
    module = Sorted()
    with pytest.raises(OnnxTrainError, match="cannot export Sorted"):
        TrainableModule(module)(torch.ones(2, 3))
    ours = TrainableModule(module, fallback=True)
    with pytest.warns(UserWarning, match="Sorted runs in torch: cannot export Sorted"):
        y = ours(torch.ones(2, 3))
    y.sum().backward()
    assert module.fc.weight.grad is not None
    ours(torch.ones(2, 3))  # and no second warning, which would be an error here


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Stopped(nn.Module):
    """Stops or bends the gradient in a way that a graph has no word for."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.fc, self.scale = nn.Linear(3, 3), nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "input":
            return self.fc(x) + x.detach()
        if self.how == "detach":
            return self.fc(x) * self.scale.detach()
        if self.how == "no_grad":
            with torch.no_grad():
                y = x * self.scale
            return self.fc(y)
        return self.scale * Straight.apply(self.fc(x))


@pytest.mark.parametrize(
    "how",
    [
        "input",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("detach", "no_grad", "function")),
    ],
)
def test_stopped_gradients_are_refused(how: str) -> None:
    with pytest.raises(OnnxTrainError, match="differs from torch"):
        TrainableModule(Stopped(how), threads=1)(torch.randn(2, 3, requires_grad=True))


def test_dropout_follows_torchs_generator() -> None:
    ours = TrainableModule(nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5)), threads=1)
    x = torch.randn(20, 4)
    torch.manual_seed(0)
    ours(x)
    torch.manual_seed(1)
    first, second = ours(x), ours(x)
    torch.manual_seed(1)
    again = ours(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    kept = (first != 0).float()
    assert kept.mean().item() == pytest.approx(0.5, abs=0.06)
    ours.zero_grad()
    first.sum().backward()
    close(ours.module[0].bias.grad, 2 * kept.sum(0))


def test_autocast_and_grad_scaler(mlp) -> None:
    ours, theirs = mlp
    x = torch.randn(4, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours(x.bfloat16()).square().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    theirs(x.bfloat16().float()).square().sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.05)
    scaler.step(optimizer)


def test_memory_is_shared(mlp) -> None:
    """What the sessions read and write is torch's own memory."""
    from onnxtrain.torch.module import from_ortvalue, to_ortvalue

    for dtype in (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16):
        t = torch.ones(3, 2).to(dtype)
        value = to_ortvalue(t)
        assert value.data_ptr() == t.data_ptr()
        if dtype is not torch.bool:
            assert from_ortvalue(value).data_ptr() == t.data_ptr()
        assert from_ortvalue(value).dtype == dtype


def test_wrapped_attributes_are_there() -> None:
    ours = TrainableModule(Mlp())
    assert ours.fc1 is ours.module.fc1
    with pytest.raises(AttributeError, match="nothing"):
        _ = ours.nothing
