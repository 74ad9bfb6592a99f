"""Modules come out of the exporter whole, in the right mode, and train as torch does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain.runtime import session as runtime
from onnxtrain.torch import from_torch, last_report
from onnxtrain.torch.exporters import ExportError


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4 * 6 * 6, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(image))).flatten(1)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.embed(ids)))


class Counting(nn.Module):
    """Gives something else on every call, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.fc(x) * self.calls


@pytest.fixture(scope="module")
def batch_norm() -> tuple[BatchNormNet, torch.Tensor]:
    torch.manual_seed(0)
    return BatchNormNet(), torch.randn(3, 1, 8, 8)


def test_batch_norm_is_put_into_training_mode(batch_norm) -> None:
    module, x = batch_norm
    before = {n: b.clone() for n, b in module.named_buffers()}
    module.eval()
    model = from_torch(module, x)
    report = last_report(model)
    assert report.exporter == "dynamo"
    assert report.repairs == ("BatchNormalization put into training mode: 1 node(s)",)
    assert set(report.names) == {n for n, _ in module.named_parameters()}
    assert not module.training
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name])
    for name in ("norm.running_mean", "norm.running_var"):
        value = model.graph.initializers[name].const_value
        stored = None if value is None else value.numpy()
        np.testing.assert_array_equal(np.asarray(stored), before[name].numpy())
    assert [x.name for x in model.graph.inputs] == ["image"]
    assert next(str(d) for d in model.graph.inputs[0].shape or ()) == "batch"


def test_evaluation_mode(batch_norm) -> None:
    module, x = batch_norm
    model = from_torch(module, x, train=False, dynamic_batch=False, names=["pixels"])
    kinds = {n.op_type: n for n in model.graph}
    assert "Dropout" not in kinds
    mode = kinds["BatchNormalization"].attributes.get("training_mode")
    assert mode is None or mode.as_int() == 0
    assert list(model.graph.inputs[0].shape or ()) == [3, 1, 8, 8]
    assert model.graph.inputs[0].name == "pixels"


def test_an_example_that_another_layer_computed() -> None:
    hidden = nn.Linear(3, 4)(torch.ones(2, 3))
    model = from_torch(nn.Linear(4, 2), hidden)
    assert last_report(model).exporter == "dynamo"


def test_attention_dropout_is_kept() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = from_torch(nn.TransformerEncoder(layer, 1), torch.randn(3, 5, 8))
    drops = [n for n in model.graph.all_nodes() if n.op_type == "Dropout"]
    assert len(drops) == 4
    assert all(len(n.inputs) == 3 for n in drops)
    assert "Dropout put into training mode: 1 node(s)" in last_report(model).repairs


def test_tied_parameters_share_an_initializer() -> None:
    model = from_torch(Tied(), torch.tensor([[1, 2], [3, 4]]))
    names = last_report(model).names
    assert set(names) == {"embed.weight", "out.weight"}
    assert len(set(names.values())) == 1
    assert list(onnxtrain.parameters(model)) == [names["embed.weight"]]


def test_export_error_names_the_reason_of_each_exporter() -> None:
    with pytest.raises(ExportError, match="cannot export Counting") as error:
        from_torch(Counting(), torch.randn(2, 3))
    assert "dynamo:" in str(error.value)
    assert "legacy:" in str(error.value)


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x, 4)


def test_export_error_names_the_unsupported_operator() -> None:
    with pytest.raises(ExportError) as error:
        from_torch(Unknown(), torch.randn(2, 3), dynamic_batch=False)
    lines = str(error.value).splitlines()
    assert "histc" in next(line for line in lines if "dynamo:" in line)
    assert all("Next steps" not in line and "\x1b" not in line for line in lines)


def test_wrong_number_of_input_names() -> None:
    with pytest.raises(ExportError, match="got 2 names for 1 inputs"):
        from_torch(nn.Linear(2, 2), torch.ones(1, 2), names=["a", "b"])


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.table + torch.tensor([0.5, 1.5, 2.5])


def test_buffers_and_literals_are_not_parameters() -> None:
    model = from_torch(Buffered(), torch.ones(2, 3))
    assert list(onnxtrain.parameters(model)) == ["fc.weight", "fc.bias"]


class LanguageModel(nn.Module):
    """A loss over ``time * batch`` labels: the sizes of both inputs depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 8, 0.2)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(0))
        scores = self.head(self.encoder(self.embed(tokens), mask))
        return nn.functional.cross_entropy(scores.view(-1, 7), labels)


def test_sizes_that_are_products_of_others_are_symbolic() -> None:
    """The check grows the labels with the batch and with the time, and compares both."""
    torch.manual_seed(0)
    module = LanguageModel()
    tokens = torch.randint(0, 7, (5, 3))
    shapes = [{0: "time", 1: "batch"}, {0: "time_x_batch"}]
    model = from_torch(module, (tokens, tokens.view(-1)), dynamic_shapes=shapes)
    assert last_report(model).fixed == {}
    sizes = [[str(d) for d in x.shape or ()] for x in model.graph.inputs]
    assert sizes == [["time", "batch"], ["time_x_batch"]]
    evaluation = from_torch(module, (tokens, tokens.view(-1)), dynamic_shapes=shapes, train=False)
    tokens = torch.randint(0, 7, (4, 2))
    session = runtime.create(evaluation.proto.SerializeToString())
    feeds = {"tokens": tokens.numpy(), "labels": tokens.view(-1).numpy()}
    expected = module.eval()(tokens, tokens.view(-1)).detach().numpy()
    np.testing.assert_allclose(runtime.run(session, None, feeds)[0], expected, rtol=1e-5)


def test_causality_of_a_mask_is_not_written_into_the_graph() -> None:
    """The example has a causal mask; the model must not apply it to other masks."""
    torch.manual_seed(0)
    module = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 8, 0.0), 1, enable_nested_tensor=False
    )
    x, causal = torch.randn(5, 3, 8), nn.Transformer.generate_square_subsequent_mask(5)
    model = from_torch(module, {"src": x, "mask": causal}, train=False, dynamic_batch=False)
    session = runtime.create(model.proto.SerializeToString())
    feeds = {"src": x.numpy(), "mask": np.zeros((5, 5), np.float32)}
    expected = module.eval()(x, torch.zeros(5, 5)).detach().numpy()
    np.testing.assert_allclose(runtime.run(session, None, feeds)[0], expected, atol=1e-5)


class Limited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.reshape(4, 2))


def test_a_size_with_which_the_module_does_not_run_is_fixed(caplog) -> None:
    with caplog.at_level("WARNING", "onnxtrain"):
        model = from_torch(Limited(), torch.randn(4, 2))
    assert list(model.graph.inputs[0].shape or ()) == [4, 2]
    assert list(last_report(model).fixed) == ["batch"]
    assert "'[4, 2]' is invalid for input of size 10" in last_report(model).fixed["batch"]
    assert "Limited has fixed sizes" in caplog.text


class Baked(nn.Module):
    """The exporters write the size of the example into the graph, where torch runs any size."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = torch.tensor([float(i) for i in range(x.shape[0])])
        return ((self.fc(x)[:, 0] + rows).repeat_interleave(2) - y).square().mean()


def test_a_size_that_the_exporters_fix_is_an_error_and_not_symbolic() -> None:
    """The second input has two rows for each row of the first: both grow, and the model fails."""
    with pytest.raises(ExportError, match="another batch"):
        from_torch(Baked(), (torch.randn(4, 2), torch.randn(8)))


def test_the_table_of_operators_is_built_once(monkeypatch) -> None:
    from torch.onnx._internal.exporter import _core, _registration

    tables = []
    export = _core.export

    def spy(*args, **options):
        tables.append(options["registry"])
        return export(*args, **options)

    monkeypatch.setattr(_core, "export", spy)
    before = vars(_registration.ONNXRegistry)["from_torchlib"]
    net, x = nn.Linear(3, 2), torch.randn(2, 3)
    first = from_torch(net, x)
    tables[0].register_op(torch.ops.aten.addmm.default, lambda *_: None)
    second = from_torch(net, x)
    assert [n.op_type for n in second.graph] == [n.op_type for n in first.graph]
    mine, other = ([*map(id, t.get_decomps(torch.ops.aten.addmm.default))] for t in tables)
    assert mine[1:] == other  # the same functions; what one export adds stays in its table
    assert vars(_registration.ONNXRegistry)["from_torchlib"] is before


class Decaying(nn.Module):
    """Counts its calls; the count scales the result if ``read``."""

    def __init__(self, *, read: bool) -> None:
        super().__init__()
        self.fc, self.read = nn.Linear(3, 2), read
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.fc(x) / (self.calls if self.read else 1.0)


def test_buffers_that_change_the_next_results_are_refused() -> None:
    x = torch.randn(2, 3)
    with pytest.raises(ExportError, match=r"Decaying changes buffers in forward .*: calls\nhint:"):
        from_torch(Decaying(read=True), x)
    module = Decaying(read=False)
    assert [y.name for y in from_torch(module, x).graph.inputs] == ["x"]
    assert module.calls == 1
