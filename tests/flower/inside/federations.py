"""Small artifacts, and a grid of clients in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import onnx_ir as ir
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

import onnxtrain
from onnxtrain.graph.builder import OpBuilder


def net(*, norm: bool = False) -> ir.Model:
    """Return x [batch, 4] -> logits [batch, 3], with BatchNormalization if asked."""
    rng = np.random.default_rng(1)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name="net")
    op = OpBuilder(graph)
    x = op.input("x", ir.DataType.FLOAT, ["batch", 4])

    def weight(name: str, array: np.ndarray) -> ir.Value:
        tensor = ir.Tensor(array.astype(np.float32), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
        value.const_value = tensor
        graph.register_initializer(value)
        return value

    h = op.Gemm(
        x, weight("fc1.weight", rng.standard_normal((4, 6))), weight("fc1.bias", np.zeros(6))
    )
    if norm:
        scale, shift = weight("norm.weight", np.ones(6)), weight("norm.bias", np.zeros(6))
        mean, var = weight("norm.mean", np.zeros(6)), weight("norm.var", np.ones(6))
        h = op.BatchNormalization(h, scale, shift, mean, var)
    h = op.Tanh(h)
    y = op.Gemm(
        h, weight("fc2.weight", rng.standard_normal((6, 3))), weight("fc2.bias", np.zeros(3))
    )
    y.name = "logits"
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=10)


def built(
    optimizer: str = "sgd:lr=0.1", *, norm: bool = False, target: str = "cpu"
) -> onnxtrain.Artifacts:
    """Return artifacts of the net."""
    return onnxtrain.build(
        net(norm=norm),
        loss="cross_entropy",
        optimizer=optimizer,
        metrics=["accuracy"],
        target=target,
    )


def rows(part: int, count: int = 24) -> dict[str, np.ndarray]:
    """Return the data of a client."""
    rng = np.random.default_rng(100 + part)
    x = rng.standard_normal((count, 4)).astype(np.float32)
    return {"x": x, "labels": (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)}


def context(node: int, config: dict | None = None) -> Context:
    """Return what Flower keeps for a node."""
    return Context(1, node, {"partition-id": node}, RecordDict(), config or {})


class LocalGrid:
    """Nodes that answer at once; ``spoil`` may change what one of them says, or keep it back."""

    def __init__(
        self,
        app: ClientApp,
        nodes: int,
        spoil: Callable[[int, Message], Message | None] | None = None,
    ) -> None:
        self.app, self.spoil = app, spoil
        self.contexts = {node: context(node) for node in range(1, nodes + 1)}
        self.sent: list[Message] = []

    def get_node_ids(self) -> list[int]:
        """Return the nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take messages to nodes; return their ids."""
        first = len(self.sent)
        for number, message in enumerate(messages, first):
            message.metadata.__dict__["_message_id"] = str(number)
            self.sent.append(message)
        return [str(number) for number in range(first, len(self.sent))]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to messages."""
        replies = []
        for message_id in message_ids:
            message = self.sent[int(message_id)]
            node = message.metadata.dst_node_id
            reply = self.app(message, self.contexts[node])
            replies.append(self.spoil(node, reply) if self.spoil else reply)
        return [reply for reply in replies if reply is not None]


def run_server(app: object, grid: LocalGrid, config: dict | None = None) -> None:
    """Run a ServerApp over the grid."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    app(grid, context(0, config))  # type: ignore[operator]


def saved(folder: Path, **options: object) -> Path:
    """Return a directory of artifacts."""
    built(**options).save(folder)  # type: ignore[arg-type]
    return folder
