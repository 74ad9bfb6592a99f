"""Preference tuning of language models: DPO, IPO and ORPO on pairs of answers, KTO on single ones.

DPO, IPO and KTO compare the model with itself before training, the reference. With adapters, the
reference is the same graph without them: :func:`add_reference` adds it as a second output that
shares all weights. Otherwise, or with ``cache_reference``, its log-probabilities are computed once
before training and are an input of each batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import PrepareError
from onnxtrain.finetuning.arguments import FineTuneOptions
from onnxtrain.finetuning.tasks import GroupTask
from onnxtrain.graph.builder import OpBuilder, copy_nodes
from onnxtrain.graph.io import CheckedModel
from onnxtrain.losses import DPO, IPO, KTO, ORPO, LossTerm
from onnxtrain.runtime import session as runtime
from onnxtrain.text.data import (
    IGNORE_INDEX,
    Example,
    GroupBatches,
    Record,
    Records,
    TokenBatches,
    answer_example,
    collate,
)
from onnxtrain.text.model_folder import LOGITS, ModelFolder, without_cache
from onnxtrain.training.data import Batch

METHODS = {"dpo": DPO, "ipo": IPO, "orpo": ORPO, "kto": KTO}
"""The loss of each method."""
REFERENCE = "reference_logits"
_LOGPS, _DESIRABLE = "reference_logps", "desirable"


class PreferenceBatches(GroupBatches):
    """Batches of rows in pairs, with the log-probabilities of the reference and KTO's labels.

    Args:
        groups: two rows per group.
        extra: values per group for inputs of the loss, ``[groups, 2]`` each.
        names: names of the model's inputs and targets.
        batch_size: groups per batch.
        pad: the padding token.
        seed: random seed for shuffling; ``None`` keeps the order.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Example]],
        extra: dict[str, np.ndarray],
        names: Sequence[str],
        *,
        batch_size: int,
        pad: int = 0,
        seed: int | None = 0,
    ) -> None:
        super().__init__(groups, None, names, batch_size=batch_size, pad=pad, seed=seed)
        self.extra = extra

    def batch(self, picked: Sequence[int]) -> Batch:
        """Return the groups with these indices as a batch."""
        rows = [example for i in picked for example in self.groups[i]]
        self.tokens += sum(len(e) for e in rows)
        arrays = collate(rows, [n for n in self.names if n not in self.extra], pad=self._pad)
        arrays |= {n: v[list(picked)].reshape(-1) for n, v in self.extra.items()}
        return Batch(arrays, np.asarray(picked), len(picked))


class PreferenceTask(GroupTask):
    """Train a language model on chosen and rejected answers, or on desirable and other ones."""

    formats = ("preference",)

    def __init__(self, folder: ModelFolder, options: FineTuneOptions, data: Any) -> None:
        self.method = options.method
        if self.method == "kto":
            self.formats = ("unpaired",)
        super().__init__(folder, options, data)
        if self.method == "kto" and min(options.batch_size, len(self.train)) < 2:
            raise PrepareError("method 'kto' needs two examples or more in a batch")
        self._logps: np.ndarray | None = None
        beta = {} if options.beta is None else {"beta": options.beta}
        loss = METHODS[self.method](**beta)
        self.cached = loss.predictions > 1 and (options.cache_reference or not options.lora_rank)
        if self.method != "kto":
            self.metrics = ("rewards/accuracies", "rewards/margins")
        self._in_graph = loss.predictions > 1 and not self.cached
        self.loss = LossTerm(loss, output=[LOGITS, REFERENCE] if self._in_graph else LOGITS)

    def _example_record(self) -> str:
        if self.method == "kto":
            return '{"prompt": ..., "completion": ..., "label": true}'
        return '{"prompt": ..., "chosen": ..., "rejected": ...}'

    def _encoded(self, records: Records) -> list[list[Example]]:
        groups = super()._encoded(records)
        empty = [g[0].line for g in groups if not all(e.learned for e in g)]
        if empty:
            raise PrepareError(
                f"{records.name}: no token of an answer is left within {self.max_length} tokens, "
                f"first at line {empty[0]}\nhint: increase max_length, or remove these records"
            )
        if self.method != "kto":
            return groups
        # KTO compares with answers to other prompts: each prompt gets the answer of the next one.
        records_ = records.records
        others = [*records_[1:], *records_[:1]]
        foreign = [self._foreign(a, b) for a, b in zip(records_, others, strict=True)]
        return [[own, other] for (own,), other in zip(groups, foreign, strict=True)]

    def _group(self, record: Record) -> list[Example]:
        assert self.tokenizer is not None
        fields = record.fields
        answers = [n for n in ("chosen", "rejected", "completion") if n in fields]
        return [
            answer_example(fields["prompt"], fields[n], record.line, self.tokenizer)
            for n in answers
        ]

    def _foreign(self, record: Record, other: Record) -> Example:
        """Return a prompt with the answer to another prompt."""
        assert self.tokenizer is not None
        prompt, answer = record.fields["prompt"], other.fields["completion"]
        if not isinstance(answer, str):
            answer = [*prompt, *answer[len(other.fields["prompt"]) :]]
        example = answer_example(prompt, answer, record.line, self.tokenizer)
        n = self.max_length
        return dataclasses.replace(example, ids=example.ids[:n], labels=example.labels[:n])

    def for_training(self, model: CheckedModel) -> CheckedModel:
        """Return the model without its KV cache, with the logits of the reference."""
        trained = without_cache(model)
        if self._in_graph:
            add_reference(trained, without_cache(self.model()))
        return CheckedModel(trained)

    def batches(self, names: Sequence[str], *, validation: bool = False) -> TokenBatches | None:
        """Return the batches."""
        picked = self.validation if validation else self.train
        if not picked:
            return None
        extra: dict[str, np.ndarray] = {}
        if self.cached:
            extra[_LOGPS] = self._reference_logps()[picked]
        if self.method == "kto":
            wanted = [bool(self.records.records[i].fields["label"]) for i in picked]
            extra[_DESIRABLE] = np.repeat(np.array(wanted, np.int64)[:, None], 2, axis=1)
        return PreferenceBatches(
            [self.groups[i] for i in picked],
            extra,
            names,
            batch_size=self.options.batch_size,
            pad=self.pad_token_id,
            seed=None if validation else self.options.seed,
        )

    def _reference_logps(self) -> np.ndarray:
        """Return the log-probabilities of all answers before training, ``[groups, 2]``."""
        if self._logps is None:
            model = _log_probability_model(without_cache(self.model()))
            session = runtime.create_for(model, threads=self.options.threads)
            names = [x.name for x in session.get_inputs()]
            rows = []
            for group in self.groups:
                feeds = collate(group, names, pad=self.pad_token_id)
                rows.append(runtime.run(session, ["logps"], feeds)[0])
            self._logps = np.stack(rows).astype(np.float32)
        return self._logps


def add_reference(model: ir.Model, base: ir.Model) -> None:
    """Add the logits of a model without adapters as the output ``reference_logits``, in place.

    Args:
        model: the model with adapters; it has the weights of ``base`` under the same names.
        base: the model without adapters.
    """
    graph = model.graph
    op = OpBuilder(graph, "reference/")
    known = {x.name: x for x in graph.inputs} | dict(graph.initializers)
    mapping: dict[ir.Value, ir.Value] = {x: known[x.name] for x in base.graph.inputs}
    for name, x in base.graph.initializers.items():
        if name in graph.initializers:
            mapping[x] = graph.initializers[name]
            continue
        copy = ir.Value(name=op.names.fresh(f"{op.prefix}{name}"), type=x.type, shape=x.shape)
        copy.const_value = x.const_value
        graph.register_initializer(copy)
        mapping[x] = copy
    copies = copy_nodes(op, base.graph, mapping)
    names = [y.name for y in base.graph.outputs]
    logits = op.Identity(copies[names.index(LOGITS)])
    logits.name = REFERENCE
    graph.outputs.append(logits)


def _log_probability_model(model: ir.Model) -> ir.Model:
    """Return a model that computes the summed log-probabilities of each row's labels."""
    graph = model.graph
    op = OpBuilder(graph, "logps/")
    logits = next(y for y in graph.outputs if y.name == LOGITS)
    loss = DPO(ignore_index=IGNORE_INDEX)
    labels = op.input("labels", ir.DataType.INT64, ["batch", "sequence"])
    total, _ = loss.log_probabilities(op, op.cast(logits, ir.DataType.FLOAT), labels)
    result = op.Identity(total)
    result.name = "logps"
    graph.outputs[:] = [result]
    return model
