"""Bytes that Flower itself makes: what JavaScript has to make too.

python -m tests.flower.inside.golden     # rewrites tests/flower/golden.json
"""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.app.message.message import make_message, remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

PATH = Path(__file__).resolve().parents[1] / "golden.json"
SCHEMAS = ("node", "fleet", "heartbeat", "message", "recorddict", "error", "run", "fab")
NODE, RUN, ID = 2**63 + 11, 2**64 - 2, "cd" * 32


def content() -> RecordDict:
    """Return records with every kind of value."""
    arrays = {
        "fc.weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
        "double": np.array([0.1, -2.5e300]),
        "scalar": np.asarray(-7.25, np.float32),
        "größe €": np.zeros((0, 2), np.float32),
        "whole": np.array([3, -(2**40)], np.int64),
        "twin": np.full(5, 0.5, np.float32),
        "twin again": np.full(5, 0.5, np.float32),
        "long": np.zeros(5 * 1024 * 1024 // 4 * 2 + 7, np.float32),
    }
    metrics = {"num-examples": 42, "loss": 0.125, "down": -9, "large": 2**64 - 3}
    lists = {"doubles": [2.0, -0.5], "wholes": [5, -600], "larges": [2**63 + 1, 7]}
    config = {"yes": True, "no": False, "text": "añb", "none": "", "raw": b"\x01\xfe", "zero": 0}
    more = {"nought": 0.0, "texts": ["", "z"], "truths": [False, True], "raws": [b"", b"\x07"]}
    return RecordDict(
        {
            "arrays": ArrayRecord({n: Array(a) for n, a in arrays.items()}),
            "metrics": MetricRecord({**metrics, **lists}),
            "config": ConfigRecord({**config, **more, "empty": []}),
        }
    )


def metadata() -> Metadata:
    """Return what a reply says about itself."""
    return Metadata(
        run_id=RUN,
        message_id="",
        src_node_id=NODE,
        dst_node_id=1,
        reply_to_message_id=ID,
        group_id="7",
        created_at=1800000000.5,
        ttl=1234.25,
        message_type="train",
        src_task_id=None,
        dst_task_id=2**63 + 99,
    )


def pushed(**body: Any) -> tuple[str, str, dict[str, bytes]]:
    """Return id, request and objects of a reply."""
    message = make_message(metadata(), **body)
    objects = {i: o.deflate() for i, o in get_all_nested_objects(message).items()}
    tree = get_object_tree(message)
    message.metadata.__dict__["_message_id"] = message.object_id
    plain = message if message.has_error() else remove_content_from_message(message)
    request = PushMessagesRequest(
        node=Node(node_id=NODE),
        messages_list=[message_to_proto(plain)],
        message_object_trees=[tree],
        clientapp_runtime_list=[2.5],
    )
    return message.metadata.message_id, request.SerializeToString(deterministic=True).hex(), objects


def golden() -> dict[str, Any]:
    """Return everything, ready for JSON."""
    reply, request, objects = pushed(content=content())
    failed, failed_request, _ = pushed(error=Error(2, "no data"))
    node = Node(node_id=NODE)
    pull = PullObjectRequest(node=node, run_id=RUN, object_id=ID)
    push = PushObjectRequest(
        node=node, run_id=RUN, object_id=ID, object_content=b"abc", session_id="s"
    )
    return {
        "schemas": {name: _schema(name) for name in SCHEMAS},
        "reply": {"id": reply, "request": request},
        "failure": {"id": failed, "request": failed_request},
        # Long ones by their digests, which their ids are.
        "objects": {i: c.hex() if len(c) < 4096 else len(c) for i, c in objects.items()},
        "heartbeat": SendNodeHeartbeatRequest(node=node, heartbeat_interval=30)
        .SerializeToString()
        .hex(),
        "activate": ActivateNodeRequest(public_key=b"KEY", heartbeat_interval=120)
        .SerializeToString()
        .hex(),
        "pull_object": pull.SerializeToString().hex(),
        "push_object": push.SerializeToString().hex(),
    }


def _schema(name: str) -> str:
    module = importlib.import_module(f"flwr.proto.{name}_pb2")
    return hashlib.sha256(module.DESCRIPTOR.serialized_pb).hexdigest()


if __name__ == "__main__":
    PATH.write_text(json.dumps(golden(), indent=1) + "\n", encoding="utf-8")
