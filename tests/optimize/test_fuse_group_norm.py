"""fuse_group_norm: decomposed or not, few passes and the values of torch."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, parser
from torch import nn

import onnxtrain
from onnxtrain import optim, thresholds
from onnxtrain.torch import from_torch
from tests.emulated_bfloat16 import element_types, emulated

F = nn.functional
HEAD = '<ir_version: 10, opset_import: ["": 21]>\n'


class Net(nn.Module):
    """A small U-Net: groups, single channels, pixels that are repeated, a shift of channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.second, self.norm2 = nn.Conv2d(16, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True)
        self.down, self.norm3 = nn.Conv2d(8, 8, 3, 2, 1), nn.GroupNorm(2, 8)
        self.last, self.plain = nn.Conv2d(16, 4, 3, padding=1), nn.GroupNorm(2, 8, affine=False)
        self.shift = nn.Linear(3, 16)
        for norm in (self.norm1, self.norm2, self.norm3):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias, -0.5, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.shift(x.mean((2, 3)))[:, :, None, None]
        y = F.silu(self.norm1(self.first(x) + shift))
        y = F.silu(self.norm2(self.second(y)))
        z = self.plain(F.silu(self.norm3(self.down(y))))
        z = F.interpolate(z, scale_factor=2.0, mode="nearest")
        return self.last(torch.cat([y, z], 1)).mean((2, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 16, 16, generator=g) * 2 + 3, torch.randn(4, 4, generator=g)


def built(precision: str = "float32", **options: Any) -> onnxtrain.Artifacts:
    return onnxtrain.build(
        from_torch(Net(), (batch()[0],)),
        loss="mse",
        optimizer=optim.SGD(lr=0.1),
        target="cuda",
        precision=precision,
        **{"dims": {"batch": 4}, **options},
    )


def kinds(model: onnx.ModelProto) -> collections.Counter[str]:
    return collections.Counter(n.op_type for n in model.graph.node)


@pytest.mark.parametrize("rows", [1, 10_000])
@pytest.mark.parametrize("options", [{}, {"dims": {}}], ids=["fixed", "any batch"])
def test_steps_follow_torch(
    rows: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a row for each group, and with one for each image where groups are few."""
    monkeypatch.setattr(thresholds, "GROUP_NORM_KERNEL_ROWS", rows)
    made, module, (x, target) = built(**options), Net(), batch()
    count = kinds(made.models["step"])
    assert count["InstanceNormalization"] == count["GroupNormalization"] == 0
    assert count["LayerNormalization"] == 4  # the backward pass reads what the forward one made
    trainer = onnxtrain.Trainer(made)
    descent = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(4):
        loss = F.mse_loss(module(x), target)
        descent.zero_grad()
        loss.backward()
        descent.step()
        assert trainer.step(x.numpy(), target.numpy()).loss == pytest.approx(loss.item(), rel=1e-5)
    for name, p in module.named_parameters():
        np.testing.assert_allclose(trainer.parameters[name], p.detach(), atol=2e-6, err_msg=name)


def test_each_norm_is_two_affines_and_one_matmul() -> None:
    """Of whole images: lines of one pass; a sum's product, a factor and a difference."""
    text = """g (float[8, 64, 16, 16] x, float[64] s, float[64] b) => (float[8, 64, 16, 16] y) {
        y = GroupNormalization <num_groups = 8> (x, s, b)
    }"""
    model = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["x", "s", "b"], target="cuda")
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    sizes = {
        v.name: np.prod([d.dim_value for d in v.type.tensor_type.shape.dim])
        for v in (*graph.value_info, *graph.output)
    }
    large = collections.Counter(
        n.op_type for n in graph.node if sizes.get(n.output[0], 0) >= 8 * 64 * 256
    )
    del large["Reshape"]
    large -= collections.Counter({"Identity": 2})
    assert large == {"LayerNormalization": 1, "BatchNormalization": 2, "Mul": 2, "Sub": 1}


@pytest.mark.parametrize("shape", [(2, 6, 9), (2, 6, 12, 12), (3, 4, 3, 5, 6)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rows", [1, 10_000])
def test_precision_does_not_depend_on_the_mean(
    shape: tuple[int, ...], groups: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "GROUP_NORM_KERNEL_ROWS", rows)
    dims, channels = ", ".join(map(str, shape)), shape[1]
    text = f"""g (float[{dims}] x, float[{channels}] s, float[{channels}] b) => (float[{dims}] y) {{
        y = GroupNormalization <num_groups = {groups}, epsilon = 0.001> (x, s, b)
    }}"""
    model = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["x", "s", "b"], target="cuda")
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) + 200.0).astype(np.float32)
    s, b = (rng.standard_normal(channels).astype(np.float32) for _ in range(2))
    dy = (rng.standard_normal(shape) + 3.0).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString())
    names = ["y", "x_grad", "s_grad", "b_grad"]
    have = session.run(names, {"x": x, "s": s, "b": b, "y_grad": dy})
    wide = [torch.from_numpy(v).double().requires_grad_() for v in (x, s, b)]
    y = F.group_norm(wide[0], groups, wide[1], wide[2], 0.001)
    y.backward(torch.from_numpy(dy).double())
    want = [y.detach(), *(v.grad for v in wide)]
    for name, a, w in zip(names, map(np.asarray, have), want, strict=True):
        assert w is not None
        scale = float(w.abs().max())
        np.testing.assert_allclose(a, w, rtol=0, atol=1e-4 * scale, err_msg=name)


def test_an_image_of_equal_values_gives_no_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "GROUP_NORM_KERNEL_ROWS", 10_000)
    text = """g (float[1, 4, 16, 16] x, float[4] s, float[4] b) => (float[1, 4, 16, 16] y) {
        y = GroupNormalization <num_groups = 2> (x, s, b)
    }"""
    model = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["x"], target="cuda")
    x = np.zeros((1, 4, 16, 16), np.float32)
    x[:, 1], x[:, 2:] = 1.0, 5.0
    one = np.ones(4, np.float32)
    dy = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    session = ort.InferenceSession(model.SerializeToString())
    y, dx = (
        np.asarray(v)
        for v in session.run(["y", "x_grad"], {"x": x, "s": one, "b": one, "y_grad": dy})
    )
    wide = torch.from_numpy(x).double().requires_grad_()
    want = F.group_norm(wide, 2, torch.ones(4).double(), torch.ones(4).double())
    want.backward(torch.from_numpy(dy).double())
    assert wide.grad is not None
    np.testing.assert_allclose(y, want.detach(), atol=1e-4)
    np.testing.assert_allclose(dx, wide.grad, rtol=1e-3, atol=1e-3)


def test_a_reshape_of_the_batch_is_not_a_group_norm() -> None:
    text = """g (float[4, 6, 16, 16] x) => (float[4, 6, 16, 16] y)
        <float[12] one = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
         float[12] zero = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
         int64[3] inside = {2, 12, 256}, int64[4] outside = {4, 6, 16, 16}> {
            r = Reshape(x, inside)
            n = InstanceNormalization(r, one, zero)
            z = Reshape(n, outside)
            y = Mul(z, z)
        }"""
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal((4, 6, 16, 16)).astype(np.float32) for _ in range(2))
    made = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["x"], target="cuda")
    session = ort.InferenceSession(made.SerializeToString())
    y, dx = session.run(["y", "x_grad"], {"x": x, "y_grad": dy})
    wide = torch.from_numpy(x).double().requires_grad_()
    want = F.instance_norm(wide.reshape(2, 12, 256)).reshape(x.shape) ** 2
    want.backward(torch.from_numpy(dy).double())
    assert wide.grad is not None
    np.testing.assert_allclose(np.asarray(y), want.detach(), atol=1e-5)
    np.testing.assert_allclose(np.asarray(dx), wide.grad, atol=1e-5)


def gradients(precision: str) -> dict[str, np.ndarray]:
    """Return the gradients of the train graph, computed on a CPU."""
    made = built(precision, check=False)
    spec = made.manifest.model("train")
    assert spec is not None
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = emulated(made.models["train"])
    session = ort.InferenceSession(model.SerializeToString(), options)
    x, target = (v.numpy() for v in batch())
    feeds = {t.name: made.values[t.name] for t in spec.inputs_of("parameter")}
    for t in spec.inputs:
        if t.role == "accumulator":
            feeds[t.name] = np.zeros([d for d in t.shape if isinstance(d, int)], np.float32)
        elif t.role == "reset":
            feeds[t.name] = np.array([True])
        elif t.name not in feeds:
            feeds[t.name] = x if len(t.shape) == 4 else target
    outputs = [y.name for y in session.get_outputs()]
    values = dict(zip(outputs, session.run(None, feeds), strict=True))
    return {
        n: np.asarray(next(v for k, v in values.items() if k.startswith(f"{n}_grad")))
        for n in (t.name for t in spec.inputs_of("parameter"))
    }


def apart(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    joined = [np.concatenate([d[n].ravel() for n in sorted(a)]) for d in (a, b)]
    return float(np.linalg.norm(joined[0] - joined[1]) / np.linalg.norm(joined[0]))


@pytest.mark.parametrize("rows", [1, 10_000])
def test_bfloat16_gradients_are_as_exact_as_with_autocast(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    monkeypatch.setattr(thresholds, "GROUP_NORM_KERNEL_ROWS", rows)
    x, target = batch()
    theirs = {}
    for mixed in (False, True):
        module = Net() if mixed else Net().double()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            y = module(x if mixed else x.double())
        F.mse_loss(y.double(), target.double()).backward()
        theirs[mixed] = {
            n: p.grad.numpy().copy() for n, p in module.named_parameters() if p.grad is not None
        }
    assert apart(theirs[False], gradients("float32")) < 1e-5
    # autocast has normalisation, SiLU and what they keep in float32.
    assert apart(theirs[False], gradients("bf16-mixed")) < 3 * apart(theirs[False], theirs[True])


def test_images_are_bfloat16_from_layer_to_layer() -> None:
    model = built("bf16-mixed", check=False).models["train"]
    onnx.checker.check_model(model, full_check=True)
    types = element_types(model)
    of_kind = collections.defaultdict(set)
    for node in model.graph.node:
        of_kind[node.op_type].add(types[node.output[0]])
    assert "Resize" not in of_kind
    for kind in ("Conv", "LayerNormalization", "Sigmoid"):
        assert of_kind[kind] == {TensorProto.BFLOAT16}, kind


@pytest.mark.parametrize(
    "attributes",
    [
        'coordinate_transformation_mode="asymmetric", nearest_mode="floor"',
        'coordinate_transformation_mode="half_pixel"',
        'coordinate_transformation_mode="asymmetric", nearest_mode="ceil"',
    ],
)
def test_repeated_pixels_are_summed_by_pooling(attributes: str) -> None:
    """If they are repeated: of the last one they are not, and matrices find that out."""
    text = f"""g (float[2, 3, 4, 5] x) => (float[2, 3, 8, 15] y)
        <float[4] scales = {{1, 1, 2, 3}}> {{
        y = Resize <mode="nearest", {attributes}> (x, , scales)
    }}"""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    dy = rng.standard_normal((2, 3, 8, 15)).astype(np.float32)
    results = []
    for target in ("cuda", "cpu"):
        made = onnxtrain.vjp(parser.parse_model(HEAD + text), wrt=["x"], target=target)
        assert ("AveragePool" in kinds(made)) == (target == "cuda" and "ceil" not in attributes)
        session = ort.InferenceSession(made.SerializeToString())
        results.append(np.asarray(session.run(["x_grad"], {"x": x, "y_grad": dy})[0]))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6, atol=1e-6)


def test_exported_models_keep_their_outputs() -> None:
    """What is asked for by name is not folded away."""
    model = ir.to_proto(from_torch(nn.GroupNorm(2, 4), (torch.randn(2, 4, 3, 3),)))
    made = onnxtrain.vjp(model, wrt=["weight"], target="cuda")
    assert model.graph.output[0].name in [y.name for y in made.graph.output]
