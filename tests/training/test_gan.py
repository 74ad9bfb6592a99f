"""Two trainers whose nets meet in one graph, and a gradient penalty: equal to torch."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.compose
import onnx.parser
import onnx_ir as ir
import torch

from onnxtrain import Trainer, build
from onnxtrain.graph.builder import OpBuilder
from onnxtrain.optim import Adam, ParamGroup

STEPS, BATCH = 5, 16
TRAINING = "ai.onnx.preview.training"


def net(seed: int, outputs: int, extra: str = "") -> onnx.ModelProto:
    rng = np.random.default_rng(seed)
    result = "float[N,1] score, float[N,2] gradient" if extra else f"float[N,{outputs}] y"
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21, "{TRAINING}" : 1]>
        net (float[N,2] x) => ({result}) {{
          a = MatMul(x, w1)  b = Add(a, b1)  h = Tanh(b)  c = MatMul(h, w2)
          {"score" if extra else "y"} = Add(c, b2)  {extra} }}"""
    )
    for name, shape in {"w1": (2, 8), "b1": (8,), "w2": (8, outputs), "b2": (outputs,)}.items():
        value = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(ir.to_proto(ir.Tensor(value, name=name)))
    return model


def torch_weights(model: onnx.ModelProto) -> dict[str, torch.Tensor]:
    values = {x.name: ir.from_proto(x).numpy() for x in model.graph.initializer}
    return {n: torch.tensor(v).requires_grad_() for n, v in values.items()}


def forward(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]


def test_a_gan_of_two_trainers_equals_torch() -> None:
    generator, critic = net(1, 2), net(2, 1)
    both = onnx.compose.merge_models(
        onnx.compose.add_prefix(generator, "g."),
        onnx.compose.add_prefix(critic, "c."),
        io_map=[("g.y", "c.x")],
    )
    frozen = Adam(lr=0.01, groups=[ParamGroup("c.*", lr_factor=0.0)])
    judge = Trainer(build(critic, loss="bce_with_logits", optimizer="adam:lr=0.01"))
    maker = Trainer(build(both, loss="bce_with_logits", optimizer=frozen))
    sample = Trainer(build(generator, loss="mse", optimizer="sgd"))
    g, c = torch_weights(generator), torch_weights(critic)
    optimizers = [torch.optim.Adam(w.values(), 0.01) for w in (c, g)]
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    rng = np.random.default_rng(0)
    labels = np.repeat(np.float32([[1], [0]]), BATCH, axis=0)
    for _ in range(STEPS):
        z, real = rng.normal(size=(2, BATCH, 2)).astype(np.float32)
        sample.load_weights({n: maker.parameters[f"g.{n}"] for n in g})
        batch = np.concatenate([real + 2, sample.predict(z)["y"]])
        losses = [judge.step(batch, labels).loss]
        maker.load_weights({f"c.{n}": judge.parameters[n] for n in c}, strict=False)
        losses.append(maker.step(z, labels[:BATCH]).loss)

        expected = []
        points = torch.cat([torch.tensor(real) + 2, forward(g, torch.tensor(z)).detach()])
        for optimizer, x, t in [(optimizers[0], points, labels), (optimizers[1], None, labels)]:
            scores = forward(c, forward(g, torch.tensor(z)) if x is None else x)
            loss = bce(scores, torch.tensor(t[: len(scores)]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name in c:
        np.testing.assert_array_equal(maker.parameters[f"c.{name}"], judge.parameters[name])


def penalized(op: OpBuilder, score: ir.Value, gradient: ir.Value) -> ir.Value:
    """Wasserstein loss; on points whose sign is 0 the norm of the gradient is to be 1."""
    sign = op.input("sign", ir.DataType.FLOAT, ["N", 1])
    norm = op.Sqrt(op.ReduceSum(gradient**2, [1], keepdims=1))
    inside = op.Sub(1.0, op.Abs(sign))
    return op.ReduceMean(sign * score + 10.0 * inside * (norm - 1.0) ** 2, keepdims=0)


def test_a_gradient_penalty_of_a_loss_function_equals_torch() -> None:
    critic = net(3, 1, f'gradient = {TRAINING}.Gradient<xs = ["x"], y = "score">(x)')
    trainer = Trainer(build(critic, loss=penalized, optimizer="sgd:lr=0.05"))
    w, rng = torch_weights(critic), np.random.default_rng(0)
    optimizer = torch.optim.SGD(w.values(), 0.05)
    sign = np.repeat(np.float32([[-1], [1], [0]]), BATCH, axis=0)
    for _ in range(STEPS):
        real, fake = rng.normal(size=(2, BATCH, 2)).astype(np.float32)
        batch = np.concatenate([real + 2, fake, (real + 2 + fake) / 2])
        x, s = torch.tensor(batch).requires_grad_(), torch.tensor(sign)
        score = forward(w, x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        norm = gradient.norm(dim=1, keepdim=True)
        loss = (s * score + 10 * (1 - s.abs()) * (norm - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(trainer.step(batch, sign).loss, loss.item(), rtol=1e-5)
    for name, value in w.items():
        np.testing.assert_allclose(trainer.parameters[name], value.detach().numpy(), atol=1e-5)
