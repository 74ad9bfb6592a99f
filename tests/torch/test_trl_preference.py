"""Preference losses and reward metrics against TRL's trainers; ``make hugging-face`` has TRL."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import onnxtrain
from onnxtrain import losses as L
from onnxtrain.autodiff.gradients import load_normalized
from onnxtrain.graph.builder import OpBuilder

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None, reason="trl is not installed: make hugging-face"
    ),
    pytest.mark.filterwarnings("ignore"),
]
PAIRS, LENGTH, WORDS, PROMPT = 4, 7, 11, 3
rng = np.random.default_rng(7)
LOGITS, REFERENCE = rng.standard_normal((2, 2 * PAIRS, LENGTH, WORDS)).astype(np.float32) * 2
IDS = rng.integers(0, WORDS, (2 * PAIRS, LENGTH))
MASK = np.ones_like(IDS)
MASK[:, :PROMPT] = 0
MASK[1, 5:] = 0
MASK[4, 4:] = 0
LABELS = np.where(MASK == 1, IDS, -100)
CHOSEN_FIRST = np.r_[0 : 2 * PAIRS : 2, 1 : 2 * PAIRS : 2]
"""TRL has all chosen answers before all rejected ones."""


def ours(
    loss: L.Loss, *, metrics: list[str] | None = None, **targets: np.ndarray
) -> tuple[dict[str, float], np.ndarray]:
    """Return loss and metrics, and the gradient of the logits."""
    op = OpBuilder(ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="logits"))
    outputs = ["logits"] if loss.predictions == 1 else ["logits", "reference"]
    for name in outputs:
        y = op.Identity(op.input(f"{name}_in", ir.DataType.FLOAT, LOGITS.shape))
        y.name = name
        op.graph.outputs.append(y)
    model = load_normalized(ir.Model(op.graph, ir_version=10)).model
    L.attach_loss(model, L.LossTerm(loss, output=outputs), metrics=metrics or [])
    proto = onnxtrain.grad(ir.to_proto(model), "logits_in", of="loss")
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    feeds = {"logits_in": LOGITS, "reference_in": REFERENCE, **targets}
    names = [y.name for y in session.get_outputs()]
    known = {x.name for x in session.get_inputs()}
    values = session.run(names, {n: a for n, a in feeds.items() if n in known})
    found = dict(zip(names, values, strict=True))
    gradient = found.pop("logits_in_grad")
    scalars = {n: float(v) for n, v in found.items() if np.ndim(v) == 0}
    return scalars, gradient


class Outputs:
    """What a model of TRL returns, from given logits."""

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        shifted, following = logits[:, :-1], labels[:, 1:]
        logps = shifted.log_softmax(-1).gather(2, following.clamp(min=0)[..., None])[..., 0]
        self.log_probs = logps * (following != -100)
        self.entropy = self.mean_logits = torch.zeros_like(self.log_probs)
        self.is_top1 = self.log_probs > 0


def trainer(models: dict[str, torch.Tensor], **settings: Any) -> SimpleNamespace:
    """Return what the loss of a trainer of TRL reads of the trainer."""

    def answer(name: str) -> Any:
        def model(labels: torch.Tensor, **_: Any) -> Outputs:
            return Outputs(models[name], labels)

        model.training = True  # type: ignore[attr-defined]
        return model

    same = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    return SimpleNamespace(
        model=answer("model"),
        ref_model=answer("reference"),
        accelerator=same,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, gradient_checkpointing=False),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        label_smoothing=0.0,
        loss_weights=[1.0],
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


@pytest.mark.parametrize(("kind", "loss"), [("sigmoid", L.DPO(beta=0.3)), ("ipo", L.IPO(beta=0.3))])
def test_dpo_and_ipo(kind: str, loss: L.Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.trainer import dpo_trainer

    monkeypatch.setattr(dpo_trainer, "disable_gradient_checkpointing", lambda *_: nullcontext())
    x = torch.tensor(LOGITS, requires_grad=True)
    models = {"model": x[CHOSEN_FIRST], "reference": torch.tensor(REFERENCE)[CHOSEN_FIRST]}
    stub = trainer(models, beta=0.3, loss_types=[kind])
    ids, mask = torch.tensor(IDS)[CHOSEN_FIRST], torch.tensor(MASK)[CHOSEN_FIRST]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    theirs = dpo_trainer.DPOTrainer._compute_loss(stub, stub.model, batch, False)
    theirs.backward()
    metrics = ["rewards/accuracies", "rewards/margins"]
    found, gradient = ours(loss, metrics=metrics, labels=LABELS)
    assert found["loss"] == pytest.approx(theirs.item(), rel=1e-5)
    assert x.grad is not None
    np.testing.assert_allclose(gradient, x.grad.numpy(), atol=1e-5)
    for name in metrics:
        assert found[name] == pytest.approx(stub._metrics["train"][name][0], rel=1e-4, abs=1e-5)


def test_orpo() -> None:
    """TRL's cross entropy has the prompt, ours the answer only: here the prompt is empty."""
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    x = torch.tensor(LOGITS, requires_grad=True)
    labels = torch.tensor(LABELS)[CHOSEN_FIRST]
    stub = trainer({"model": x, "reference": x}, beta=0.2)
    stub.is_encoder_decoder, stub.padding_value = False, 0
    stub.concatenated_inputs = lambda *_, **__: {
        "concatenated_input_ids": torch.tensor(IDS)[CHOSEN_FIRST],
        "concatenated_attention_mask": torch.tensor(MASK)[CHOSEN_FIRST],
        "concatenated_labels": labels,
    }
    stub.concatenated_forward = lambda *a: ORPOTrainer.concatenated_forward(stub, *a)
    stub.odds_ratio_loss = lambda *a: ORPOTrainer.odds_ratio_loss(stub, *a)
    stub.get_batch_logps = ORPOTrainer.get_batch_logps
    answer = SimpleNamespace(logits=x[CHOSEN_FIRST])
    theirs, metrics = ORPOTrainer.get_batch_loss_metrics(
        stub, lambda *_, **__: answer, {"chosen_labels": labels[:PAIRS]}
    )
    theirs.backward()
    names = ["rewards/accuracies", "rewards/margins"]
    found, gradient = ours(L.ORPO(beta=0.2), metrics=names, labels=LABELS)
    assert found["loss"] == pytest.approx(theirs.item(), rel=1e-5)
    assert x.grad is not None
    np.testing.assert_allclose(gradient, x.grad.numpy(), atol=1e-5)
    for name in names:
        assert found[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-5)


def test_kto(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.trainer import kto_trainer

    monkeypatch.setattr(kto_trainer, "disable_gradient_checkpointing", lambda *_: nullcontext())
    x, reference = torch.tensor(LOGITS, requires_grad=True), torch.tensor(REFERENCE)
    wanted = np.array([1, 0, 0, 1])
    own, foreign = torch.arange(0, 2 * PAIRS, 2), torch.arange(1, 2 * PAIRS, 2)
    ids, mask = torch.tensor(IDS), torch.tensor(MASK)
    # The answers to other prompts are the batch "KL"; its values are read without a gradient.
    stub = trainer(
        {},
        beta=0.4,
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=1.5,
        undesirable_weight=0.5,
    )

    def model_of(logits: torch.Tensor) -> Any:
        def model(input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Outputs:
            rows = own if torch.equal(input_ids, ids[own]) else foreign
            return Outputs(logits[rows], labels)

        model.training = True  # type: ignore[attr-defined]
        return model

    stub.model, stub.ref_model = model_of(x), model_of(reference)
    stub._compute_kl_logps = lambda *a: kto_trainer.KTOTrainer._compute_kl_logps(stub, *a)
    batch = {
        "input_ids": ids[own],
        "attention_mask": torch.ones_like(ids[own]),
        "completion_mask": mask[own],
        "KL_input_ids": ids[foreign],
        "KL_attention_mask": torch.ones_like(ids[foreign]),
        "KL_completion_mask": mask[foreign],
        "label": torch.tensor(wanted),
    }
    theirs = kto_trainer.KTOTrainer._compute_loss(stub, stub.model, batch, False)
    theirs.backward()
    loss = L.KTO(beta=0.4, desirable_weight=1.5, undesirable_weight=0.5)
    desirable = np.repeat(wanted, 2)
    found, gradient = ours(loss, labels=LABELS, desirable=desirable)
    assert found["loss"] == pytest.approx(theirs.item(), rel=1e-5)
    assert x.grad is not None
    np.testing.assert_allclose(gradient, x.grad.numpy(), atol=1e-5)
