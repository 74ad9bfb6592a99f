"""An ONNX file as a torch module: the file's values, gradients of ``vjp``, torch's habits."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onnxtrain
from onnxtrain.errors import OnnxTrainError, UncopiableError
from onnxtrain.graph.io import save
from onnxtrain.torch import OnnxModule, TrainableModule, as_module, from_torch
from tests.cases.evaluate import stock
from tests.small_nets import NET, PARAMETERS, parse
from tests.wild.as_torch import HALF_LIMIT, LIMIT, gradient_errors
from tests.wild.samples import SAMPLES, filled

IDS = torch.tensor([0, 2, 2, 4])


def net(**options: Any) -> OnnxModule:
    return as_module(parse(NET), threads=1, **options)


def x(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


class Twin(nn.Module):
    """The same net in torch."""

    def __init__(self) -> None:
        super().__init__()
        values = onnxtrain.parameters(parse(NET))
        self.table = nn.Parameter(torch.tensor(values["table"]))
        self.fc = nn.Module()
        self.fc.weight = nn.Parameter(torch.tensor(values["fc.weight"]))
        self.fc.bias = nn.Parameter(torch.tensor(values["fc.bias"]))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return torch.tanh(x @ self.fc.weight + self.fc.bias + self.table[ids])


def same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_parameters_and_results_have_the_names_of_the_file() -> None:
    module = net()
    names = [n for n, _ in Twin().named_parameters()]
    assert sorted(names) == sorted(PARAMETERS)
    assert [n for n, _ in module.named_parameters()] == names
    assert list(module.state_dict()) == names
    by_position, by_name = module(x(), IDS), module(ids=IDS, x=x())
    assert by_position._fields == ("y", "norm", "best")
    for a, b in zip(by_position, by_name, strict=True):
        torch.testing.assert_close(a, b)
    assert not by_position.best.requires_grad
    assert isinstance(module.get_submodule("fc"), nn.Module)
    assert module.get_parameter("fc.weight").shape == (3, 2)


def test_gradients_of_all_outputs_equal_vjp() -> None:
    module, draw = net(), np.random.default_rng(0)
    dy, dnorm = draw.standard_normal((4, 2), np.float32), draw.standard_normal(4, np.float32)
    y, norm, _ = module(x(), IDS)
    torch.autograd.backward([y, norm], [torch.from_numpy(dy), torch.from_numpy(dnorm)])
    weights = onnxtrain.parameters(parse(NET)).values()
    expected = stock(onnxtrain.vjp(parse(NET)))([x().numpy(), IDS.numpy(), *weights, dy, dnorm])
    for name, g in zip(PARAMETERS, expected[3:], strict=True):
        np.testing.assert_allclose(module.get_parameter(name).grad, g, rtol=1e-5)


@pytest.mark.parametrize("label", SAMPLES)
@pytest.mark.filterwarnings("ignore")
def test_files_of_other_tools_have_the_gradients_of_vjp(label: str, tmp_path: Path) -> None:
    path = filled(label, tmp_path)
    assert gradient_errors(path, tmp_path).module <= (HALF_LIMIT if "fp16" in label else LIMIT)
    as_module(path).to_onnx(tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == path.read_bytes()


def test_several_calls_before_backward_and_two_uses_in_one_graph() -> None:
    ours, theirs = net(outputs="y"), Twin()
    for module in (ours, theirs):
        first, second = module(x(1), IDS), module(x(2), IDS.flip(0))
        (first * second).sum().backward()
        module(x(3), IDS).pow(2).sum().backward()
    same_gradients(ours, theirs)


def test_inputs_that_are_not_leaves() -> None:
    ours, theirs = net(outputs="y"), Twin()
    grads = []
    for module in (ours, theirs):
        leaf = x().requires_grad_()
        (module(leaf.sin(), IDS) ** 2).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)
    same_gradients(ours, theirs)


def test_a_value_inside_the_model_is_an_output() -> None:
    module = net(outputs="s")
    expected = net(outputs="y")
    torch.testing.assert_close(module(x(), IDS).tanh(), expected(x(), IDS))
    module(x(), IDS).sum().backward()
    assert module.table.grad is not None


def test_no_grad_frozen_parameters_and_hooks() -> None:
    module, seen = net(outputs="y"), []
    with torch.no_grad():
        assert not module(x(), IDS).requires_grad
    module.get_parameter("fc.weight").requires_grad_(False)
    module.table.register_hook(lambda g: seen.append(g.clone()))
    module.register_forward_hook(lambda m, inputs, output: seen.append(output.shape))
    module(x(), IDS).sum().backward()
    assert module.get_parameter("fc.weight").grad is None
    shape, gradient = seen
    assert shape == (4, 2)
    torch.testing.assert_close(gradient, module.table.grad)


def test_a_whole_run_equals_torch() -> None:
    ours, theirs = net(outputs="y"), Twin()
    for module in (ours, theirs):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for step in range(10):
            optimizer.zero_grad()
            checkpoint(module, x(step), IDS, use_reentrant=False).pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_functional_call_and_autocast() -> None:
    module = net(outputs="y")
    zeros = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    assert not torch.func.functional_call(module, zeros, (x(), IDS)).any()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x().bfloat16(), IDS)
    assert y.dtype == torch.float32


def test_state_dict_pickle_and_copy(tmp_path: Path) -> None:
    module = net(outputs="y")
    with torch.no_grad():
        module.table.add_(1)
    fresh = net(outputs="y")
    fresh.load_state_dict(module.state_dict())
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (fresh, loaded, copy.deepcopy(module)):
        assert list(other.state_dict()) == list(module.state_dict())
        torch.testing.assert_close(other(x(), IDS), module(x(), IDS))
        other.to_onnx(tmp_path / "net.onnx")
        table = onnxtrain.parameters(tmp_path / "net.onnx")["table"]
        np.testing.assert_array_equal(table, module.table.detach())


def test_to_onnx_changes_what_has_trained_only(tmp_path: Path) -> None:
    path, out = tmp_path / "net.onnx", tmp_path / "out" / "net.onnx"
    onnx.save(parse(NET), path)
    module = as_module(path, threads=1)
    module.to_onnx(out)
    assert out.read_bytes() == path.read_bytes()
    with torch.no_grad():
        module.get_parameter("fc.bias").add_(1)
    module.to_onnx(out)
    before, after = (onnx.load(p) for p in (path, out))
    tensors = zip(before.graph.initializer, after.graph.initializer, strict=True)
    changed = [a.name for a, b in tensors if not np.array_equal(array(a), array(b))]
    assert changed == ["fc.bias"]
    got = onnxruntime.InferenceSession(str(out)).run(["y"], {"x": x().numpy(), "ids": IDS.numpy()})
    torch.testing.assert_close(torch.from_numpy(got[0]), module(x(), IDS).y.detach())


def array(tensor: onnx.TensorProto) -> np.ndarray:
    return ir.serde.deserialize_tensor(tensor).numpy()


def test_large_weights_beside_the_file(tmp_path: Path) -> None:
    path, model = tmp_path / "net.onnx", parse(NET)
    for tensor in model.graph.initializer:  # only raw bytes go beside the file
        tensor.CopyFrom(ir.serde.serialize_tensor(ir.Tensor(array(tensor), name=tensor.name)))
    onnx.save(model, path, save_as_external_data=True, location="net.data", size_threshold=0)
    module = as_module(path, threads=1)
    module.to_onnx(tmp_path / "copy" / "net.onnx")
    assert (tmp_path / "copy" / "net.onnx").read_bytes() == path.read_bytes()
    data = (tmp_path / "copy" / "net.data").read_bytes()
    assert data == (tmp_path / "net.data").read_bytes()


def test_frozen_weights_beyond_a_protobuf_stay_in_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of nothing, a small file takes the way of a large one."""
    monkeypatch.setattr("onnxtrain.graph.io.external_data.LARGE_MODEL_BYTES", 0)
    linear = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    path = tmp_path / "net.onnx"
    save(from_torch(linear, torch.randn(2, 32)), path, external_data_above=0)
    module = as_module(path, train="2.*", threads=1)
    batch = torch.randn(3, 32)
    torch.testing.assert_close(module(batch), linear(batch))
    module(batch).sum().backward()
    linear(batch).sum().backward()
    torch.testing.assert_close(module.get_parameter("2.weight").grad, linear[2].weight.grad)


@pytest.fixture(scope="module")
def cnn() -> tuple[nn.Module, bytes]:
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()),
        nn.Linear(144, 3),
    )
    return module, from_torch(module, torch.randn(2, 1, 8, 8)).proto.SerializeToString()


def test_batch_normalization_follows_train_and_eval(cnn: tuple[nn.Module, bytes]) -> None:
    theirs, data = copy.deepcopy(cnn[0]), cnn[1]
    theirs[3].p = 0.0
    ours, images = as_module(data, threads=1), torch.randn(5, 1, 8, 8)
    buffers = [n for n, _ in ours.named_buffers()]
    assert buffers == ["1.running_mean", "1.running_var"]
    start = ours.state_dict()["1.running_mean"].clone()
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))
    torch.testing.assert_close(ours.get_buffer("1.running_mean"), start)
    ours.train()(images)
    theirs.train()(images)
    for name in buffers:
        torch.testing.assert_close(ours.get_buffer(name), theirs.get_buffer(name))
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))


def test_dropout_draws_from_the_generator_of_torch(cnn: tuple[nn.Module, bytes]) -> None:
    module, images = as_module(cnn[1], threads=1), torch.randn(5, 1, 8, 8)
    torch.manual_seed(3)
    first, second = module(images), module(images)
    torch.manual_seed(3)
    torch.testing.assert_close(module(images), first)
    assert not torch.equal(first, second)


def test_adapters_are_the_parameters_and_the_base_stays(tmp_path: Path) -> None:
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    path = tmp_path / "net.onnx"
    from_torch(linear, torch.randn(2, 8)).save(path)
    adapted = onnxtrain.lora(path, rank=2, targets="all-linear")
    module = as_module(adapted, threads=1)
    assert [n for n, _ in module.named_parameters()] == list(adapted.names)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    batch, losses = torch.randn(6, 8), []
    for _ in range(5):
        loss = module(batch).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted.export_merged(tmp_path / "merged.onnx", module.state_dict())
    merged = onnxruntime.InferenceSession(str(tmp_path / "merged.onnx"))
    (got,) = merged.run(None, {merged.get_inputs()[0].name: batch.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), module(batch).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["type", "a.type.weight", "onnx::MatMul_3", "/net/w", "a.b", "a"])
def test_any_name_of_a_weight(name: str) -> None:
    model = parse("g (float[N,2] x) => (float[N,2] y) <float[2] w = {1.0,2.0}> { y = Mul(x, w) }")
    model.graph.initializer[0].name = model.graph.node[0].input[1] = name
    module = as_module(model, train=[name], threads=1)
    module(torch.ones(1, 2)).sum().backward()
    assert {n: p.grad.tolist() for n, p in module.named_parameters()} == {name: [1.0, 1.0]}
    module.load_state_dict({name: torch.tensor([5.0, 6.0])})
    assert module(torch.ones(1, 2)).tolist() == [[5.0, 6.0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(x()), "missing: ids\nhint: the model takes x, ids"),
        (lambda m: m(x(), IDS, z=IDS), "unknown: z"),
        (lambda m: m(x(), IDS, x=x()), "twice: x"),
        (lambda m: m(x(), IDS, IDS), "3 arguments"),
        (lambda m: m(x().double(), IDS), "'x' is torch.float64, the model takes torch.float32"),
        (lambda m: m.double()(x(), IDS), "parameter 'fc.weight' is torch.float64"),
    ],
)
def test_wrong_calls_are_refused(call: Any, message: str) -> None:
    with pytest.raises(OnnxTrainError, match=re.escape(message)):
        call(net())


def test_a_path_given_to_trainable_module_is_an_error_with_a_hint() -> None:
    with pytest.raises(OnnxTrainError, match="as_module"):
        TrainableModule("net.onnx")  # pyright: ignore[reportArgumentType]


def test_too_large_to_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> bytes:
        raise ValueError("Message onnx.ModelProto exceeds maximum protobuf size of 2GB")

    module = net()
    monkeypatch.setattr("onnxtrain.torch.onnx_module.ir.to_proto", too_large)
    with pytest.raises(UncopiableError, match="state_dict"):
        copy.deepcopy(module)


@pytest.mark.parametrize("grad", [True, False])
def test_a_graph_cut_at_its_normalizations_computes_the_same(
    grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    convolutions = [nn.Conv2d(c, d, 3, bias=False) for c, d in ((1, 4), (4, 2))]
    layers = [convolutions[0], nn.BatchNorm2d(4), nn.Tanh(), convolutions[1]]
    file = from_torch(nn.Sequential(*layers, nn.BatchNorm2d(2)), torch.randn(2, 1, 8, 8))
    whole, cut = (as_module(file, threads=1, sync_batch_norm=s) for s in (False, True))
    monkeypatch.setattr("onnxtrain.torch.onnx_module.has_peers", lambda: True)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda x: None)  # of one worker
    images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            torch.testing.assert_close(cut(images), whole(images))
    if grad:
        inputs = [images.clone().requires_grad_() for _ in range(2)]
        for module, x in zip((cut, whole), inputs, strict=True):
            (module(x) * images[:, :, 2:6, 2:6]).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)
        for p, q in zip(cut.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cut.state_dict(), whole.state_dict())
    assert any("running_var" in n for n in cut.state_dict())


def test_statistics_in_a_body_cannot_be_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 2] x, bool c) => (float[N, 2] y)
          <float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] m = {0, 0}, float[2] v = {1, 1}> {
          y = If (c) <
            then_branch = t () => (float[N, 2] z) {
              [norm] z, rm, rv = BatchNormalization <training_mode = 1> (x, s, b, m, v)
            },
            else_branch = e () => (float[N, 2] w) { w = Mul (x, s) }>
        }"""
    )
    module = as_module(model, threads=1, sync_batch_norm=True)
    monkeypatch.setattr("onnxtrain.torch.onnx_module.has_peers", lambda: True)
    with pytest.raises(OnnxTrainError, match=r"is in the body of another node(.|\n)*hint:"):
        module(torch.randn(4, 2), torch.tensor(True))
