"""Fine-tuning of a model's own file: data, adapters, training, samples and files out.

What a finished fine-tuning leaves: adapters for others, and a model to serve.

What a run shows on the way: tokens per second, time of a step, perplexity.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnxtrain.adapters import Adapted, lora
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.errors import OnnxTrainError
from onnxtrain.finetuning.arguments import FineTuneOptions
from onnxtrain.finetuning.tasks import (
    CausalTask,
    ClassificationTask,
    EmbeddingTask,
    Task,
    VisionTask,
)
from onnxtrain.graph.io import CheckedModel, load, save
from onnxtrain.graph.io.writer import bytes_writer, write_files
from onnxtrain.importer import expose_weights
from onnxtrain.options import from_arguments, recorded_options
from onnxtrain.planning import plan
from onnxtrain.planning.memory_plan import format_bytes
from onnxtrain.text.data import TokenBatches
from onnxtrain.text.generate import Decoder, Sampling, generate_tokens, make_decoder
from onnxtrain.text.model_folder import ModelFolder, inspect_model
from onnxtrain.training import Trainer
from onnxtrain.training.callbacks import Callback, Record
from onnxtrain.training.fit import History
from onnxtrain.training.progress import Display, display

if TYPE_CHECKING:
    from onnxtrain.training.fit import Run
    from onnxtrain.training.results import StepResult

_COMPANION_FILES = (
    *("genai_config.json", "config.json", "generation_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.txt"),
    *("added_tokens.json", "merges.txt", "vocab.json", "tokenizer.model"),
    "preprocessor_config.json",
)
"""Files that go with a model to where it is served."""


def write_outputs(
    trainer: Trainer,
    adapted: Adapted | None,
    folder: ModelFolder,
    output: Path,
    *,
    requantize: bool = False,
) -> dict[str, str]:
    """Write everything; return in words what lies where.

    A language model with adapters gives ``peft/``, ``adapter.onnx_adapter`` with ``base/`` and
    ``merged/``. Anything else gives ``merged/``: the model with its trained weights.
    """
    written: dict[str, str] = {}
    merged = output / "merged" / folder.path.name
    merged.parent.mkdir(parents=True, exist_ok=True)
    if adapted is not None and not adapted.not_in_peft:
        adapted.export_peft(output / "peft", trainer, task_type=_PEFT_TASK_TYPES.get(folder.kind))
        written["peft/"] = "the adapters, for PEFT on the torch original"
    if adapted is not None and folder.kind == "causal_lm":
        if not adapted.dora:
            adapted.export_ort_adapter(output / "adapter.onnx_adapter", trainer)
            base = output / "base" / folder.path.name
            base.parent.mkdir(parents=True, exist_ok=True)
            adapted.export_ort_base(base)
            copy_companion_files(folder, base.parent)
            written["adapter.onnx_adapter"] = "the same for onnxruntime and onnxruntime-genai"
            written["base/"] = "the model with inputs for it"
        how = "requantize" if requantize else "branch"
        report = adapted.export_merged(merged, trainer, quantized=how)
        written["merged/"] = f"a model to serve: {report}"
    elif folder.kind == "causal_lm":
        save(with_trained_weights(folder, trainer), merged)
        written["merged/"] = "a model to serve, with the trained weights"
    else:
        trainer.export(merged)
        written["merged/"] = "a model to serve, with the trained weights"
    copy_companion_files(folder, merged.parent)
    return written


def with_trained_weights(folder: ModelFolder, trainer: Trainer) -> ir.Model:
    """Return the model of the folder, cache and all, with the trained weights in their places."""
    model, _ = expose_weights(load(folder.model))
    for name, array in trainer.parameters.items():
        place = model.graph.initializers[name]
        assert place.const_value is not None
        dtype = place.const_value.dtype
        place.const_value = ir.Tensor(array.astype(dtype.numpy()), dtype, name=name)
    return model


_PEFT_TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "classification": "SEQ_CLS",
    "embeddings": "FEATURE_EXTRACTION",
}


def copy_companion_files(folder: ModelFolder, target: Path) -> None:
    """Copy tokenizer and configuration to where a model was written."""
    for name in _COMPANION_FILES:
        source = folder.folder / name
        if source.is_file():
            shutil.copyfile(source, target / name)


def write_json(path: Path, value: Any) -> None:
    """Write a file of settings or results: whole, or the old one stays."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_files(repr(str(path)), {str(path.absolute()): bytes_writer(text.encode())})


_FIRST = 2  # steps that are slower than the others


class TokenDisplay:
    """A display that counts tokens where others count samples."""

    def __init__(self, inner: Display, batches: TokenBatches) -> None:
        self._inner, self._batches, self._seen = inner, batches, 0

    def start(self, epochs: int, total: int | None, done: int) -> None:
        """Begin."""
        self._seen = self._batches.tokens
        self._inner.start(epochs, total, done)

    def step(self, epoch: int, loss: float, lr: float, samples: int) -> None:
        """Show a batch."""
        new, self._seen = self._batches.tokens - self._seen, self._batches.tokens
        self._inner.step(epoch, loss, lr, new)

    def line(self, text: str) -> None:
        """Show a message."""
        self._inner.line(text)

    def stop(self) -> None:
        """End."""
        self._inner.stop()


class ThroughputReporter(Callback):
    """Tells after the first steps how long a step takes, and all of them."""

    def __init__(self, batches: TokenBatches) -> None:
        self._batches = batches
        self._started = self._steps = self._tokens = 0.0
        self.seconds: float | None = None
        """Of a step."""
        self.tokens_per_second: float | None = None
        self._told = False

    def on_start(self, run: Run) -> None:
        """Begin."""
        self._steps = 0

    def on_step(self, run: Run, result: StepResult) -> None:
        """Measure from the third step on."""
        self._steps += 1
        now = time.perf_counter()
        if self._steps == _FIRST:
            self._started, self._tokens = now, self._batches.tokens
        if self._steps <= _FIRST:
            return
        done = self._steps - _FIRST
        self.seconds = (now - self._started) / done
        self.tokens_per_second = (self._batches.tokens - self._tokens) / (now - self._started)
        if not self._told and self._steps == _FIRST + 2:
            self._told = True
            left = "" if run.batches is None else self._left(run)
            run.show.line(
                f"{self.seconds:.2f} s per batch, {self.tokens_per_second:,.0f} "
                f"{self._batches.unit}/s{left}"
            )

    def _left(self, run: Run) -> str:
        assert run.batches is not None
        rest = run.batches * run.epochs - (run.epoch * run.batches + run.batch)
        minutes, seconds = divmod(round(rest * (self.seconds or 0.0)), 60)
        return f", {minutes} min {seconds:02d} s to go"


def show_perplexity(run: Run, record: Record) -> None:
    """Show the perplexity of an epoch's validation."""
    if "val_loss" in record:
        run.show.line(f"  validation: perplexity {perplexity(record['val_loss']):.4g}")


def perplexity(loss: float) -> float:
    """Return ``e^loss``; infinity where that is too large.

    >>> perplexity(0.0), perplexity(1e9)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


PrintLine = Callable[[str], None]
"""Takes a line for the user."""


SETTINGS, REPORT = "finetune.json", "report.json"
_TASK_CLASSES = {
    "causal_lm": CausalTask,
    "classification": ClassificationTask,
    "embeddings": EmbeddingTask,
    "vision": VisionTask,
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a model writes after a prompt, before and after training."""

    prompt: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class FineTuneResult:
    """What a fine-tuning gave."""

    history: History
    before: dict[str, float]
    """Numbers of the validation before training; empty if there is none."""
    after: dict[str, float]
    samples: tuple[Sample, ...]
    files: dict[str, str]
    """What lies where in the folder, in words."""
    notes: tuple[str, ...]


def finetune(
    model: str | os.PathLike[str],
    data: Any,
    output: str | os.PathLike[str],
    *,
    kind: str | None = None,
    validation: Any = None,
    tokenizer: Any = None,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    targets: str | Sequence[str] = (),
    train: str | Sequence[str] | None = None,
    epochs: int = 3,
    batch_size: int = 4,
    accumulate: int = 1,
    lr: float | None = None,
    schedule: str = "cosine",
    warmup: float = 0.03,
    optimizer: str = "adamw",
    clip: float | None = 1.0,
    max_length: int | None = None,
    pack: bool = False,
    learn_prompts: bool = False,
    recompute: str | Sequence[str] = (),
    prompts: Sequence[str] = (),
    sample_tokens: int = 40,
    requantize: bool = False,
    checkpoint_every: int = 100,
    resume: bool = False,
    seed: int = 0,
    device: str = "cpu",
    threads: int | None = None,
    progress: bool | str = True,
) -> FineTuneResult:
    """Fine-tune an ONNX file on texts or images, and write adapters and a model to serve.

    Nothing of the model's own folder is changed.

    Args:
        model: an ``.onnx`` file, or its folder (as onnxruntime-genai and optimum write them).
        data: a file (``.jsonl``, ``.json``, ``.csv``, plain text), a list of records or texts, or
            token ids (``{"input_ids": ..., "labels": ...}``). Of a vision model: a folder with a
            folder of images for each class, a table with columns ``image`` and ``label``, or
            arrays by the input's name and ``labels``.
        output: the folder to write: ``peft/``, ``adapter.onnx_adapter``, ``merged/``, ``run/``.
        kind: ``"causal_lm"``, ``"classification"``, ``"embeddings"`` or ``"vision"``; told by the
            files.
        validation: a file, or a part of the data such as 0.1; by default a twentieth of it.
        tokenizer: the folder of the tokenizer; that of the model.
        lora_rank: rank of the adapters; 8 for language models. 0 trains the weights themselves,
            as is usual for encoders.
        lora_alpha: adapters are scaled by ``alpha / rank``; twice the rank.
        targets: which layers get adapters, those of attention by default: see
            :func:`onnxtrain.lora`.
        train: without adapters, which weights train: ``"bias"``, ``"norm"``, ``"last:2"``, names or
            globs; all of them by default.
        epochs: how often to go through the data.
        batch_size: rows, records or pairs of a batch.
        accumulate: batches that count as one.
        lr: learning rate; 2e-4 for adapters, 2e-5 for weights.
        schedule: of the learning rate.
        warmup: steps, or a part of all steps if below 1.
        optimizer: its name.
        clip: the largest joint norm of the gradients.
        max_length: tokens of a row; 512, or what the model takes.
        pack: put several examples into a row.
        learn_prompts: learn prompts and what users say, too.
        recompute: what to compute again instead of keeping it: see :func:`onnxtrain.build`.
        prompts: texts that the model goes on from before and after; by default, starts of examples.
        sample_tokens: how long these samples are; 0 for none.
        requantize: round adapters into quantized weights of the merged model; else they stay
            branches beside them.
        checkpoint_every: steps between checkpoints, besides the one after each epoch.
        resume: go on from the last checkpoint in ``output``; the options must be the same, but
            there may be more epochs.
        seed: of adapters, masks and the order of the data.
        device: ``"cpu"`` or ``"cuda"``.
        threads: of onnxruntime's pool; all cores by default.
        progress: ``True``, ``"bar"``, ``"plain"`` or ``False``.

    Raises:
        LoadError: model, tokenizer or data cannot be read.
        PrepareError: they do not fit each other; always before the first step.
    """
    options = from_arguments(FineTuneOptions, locals())
    return FineTuneRun(model, data, options).run(Path(output))


class FineTuneRun:
    """A fine-tuning that is prepared: data read, model known; nothing is built or written yet."""

    def __init__(self, model: str | os.PathLike[str], data: Any, options: FineTuneOptions) -> None:
        self.folder: ModelFolder = inspect_model(model, options.kind)
        self.options = options.completed(self.folder.kind)
        self.task: Task = _TASK_CLASSES[self.folder.kind](self.folder, self.options, data)
        self._settings = {
            **recorded_options(self.options),
            "model": os.path.abspath(self.folder.path),
            "data": os.fsdecode(data) if isinstance(data, str | os.PathLike) else "given",
        }

    def prepared(self) -> tuple[Adapted | None, Artifacts]:
        """Return the model with its adapters, if it has any, and what trains it."""
        o, task = self.options, self.task
        source = task.model()
        adapted = None
        train = o.train
        if train is not None and task.trained:
            train = [*([train] if isinstance(train, str) else train), *task.trained]
        if o.lora_rank:
            adapted = lora(source, o.lora_rank, o.lora_alpha or 1.0, o.targets, seed=o.seed)
            train = [*adapted.names, *task.trained] if task.trained else None
            source = CheckedModel(adapted.model)
        artifacts = build(
            task.for_training(source),
            loss=task.loss,
            optimizer=o.optimizer,
            train=train,
            metrics=task.metrics,
            clip=o.clip,
            accumulate=o.accumulate,
            recompute=o.recompute,
            target="cuda" if o.device.startswith("cuda") else "cpu",
        )
        return adapted, artifacts

    def plan(self, adapted: Adapted | None, artifacts: Artifacts) -> list[str]:
        """Return in words what will be done."""
        o, folder = self.options, self.folder
        trained = sum(artifacts.values[p.name].size for p in artifacts.manifest.parameters)
        how = (
            f"adapters of rank {o.lora_rank}" if adapted is not None else "the model's own weights"
        )
        lines = [
            f"model: {folder.path} ({folder.kind}, told by {folder.reason})",
            f"data: {self.task.summary()}",
            f"trains: {trained:,} numbers in {len(artifacts.manifest.parameters)} tensors, {how}",
            f"run: {o.epochs} epochs, batches of {o.batch_size}"
            + (f" x {o.accumulate}" if o.accumulate > 1 else "")
            + f", {o.optimizer}, lr {o.lr:g}, {o.schedule}",
            *self._memory(artifacts),
        ]
        notes = [*self.task.notes, *(() if adapted is None else adapted.notes)]
        if adapted is not None and adapted.not_in_peft:
            notes.append(f"no peft/: torch has {adapted.not_in_peft[0]} only as a part of others")
        return [*lines, *(f"note: {n}" for n in dict.fromkeys(notes))]

    def _memory(self, artifacts: Artifacts) -> list[str]:
        """Return in words what a step of the largest batch takes, where that can be told."""
        if self.options.device != "cpu":
            return []
        sizes, words = self.task.memory_sizes()
        return [f"memory: about {format_bytes(plan(artifacts, **sizes).peak)} at {words}"]

    def run(self, output: Path) -> FineTuneResult:
        """Train, and write everything to a folder."""
        o, task = self.options, self.task
        say = _line_printer(o.progress)
        self._check_settings(output)
        adapted, artifacts = self.prepared()
        for line in self.plan(adapted, artifacts):
            say(line)
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / SETTINGS, self._settings)
        prompts, first = self._first_texts(say)
        trainer = Trainer(artifacts, device=o.device, seed=o.seed, threads=o.threads)
        held = task.batches(trainer.inputs, validation=True)
        before = self._numbers(trainer, held)
        if before:
            say(f"before: {_format_metrics(before)}")
        history = self._fit(trainer, output, held)
        after = self._numbers(trainer, held)
        files = write_outputs(trainer, adapted, self.folder, output, requantize=bool(o.requantize))
        if isinstance(task, ClassificationTask | VisionTask):
            write_json(output / "labels.json", dict(enumerate(task.classes)))
            files["labels.json"] = "the classes by number"
        samples = self._samples(prompts, first, output)
        result = FineTuneResult(history, before, after, samples, files, tuple(task.notes))
        self._report(result, output, say)
        return result

    def _fit(self, trainer: Trainer, output: Path, held: Any) -> History:
        o, task = self.options, self.task
        batches = task.batches(trainer.inputs)
        assert batches is not None
        causal = isinstance(task, CausalTask)
        shown = display(o.progress, unit=batches.unit)
        pace = ThroughputReporter(batches)
        return trainer.fit(
            batches,
            epochs=o.epochs,
            lr=o.lr,
            schedule=o.schedule,
            warmup=o.warmup,
            validation=held,
            callbacks=[pace, *([show_perplexity] if causal else [])],
            progress=TokenDisplay(shown, batches) if o.progress else False,
            directory=output / "run",
            resume=o.resume,
            checkpoint_every=o.checkpoint_every,
        )

    def _numbers(self, trainer: Trainer, held: Any) -> dict[str, float]:
        """Return what the validation says of the weights of the moment."""
        if held is None:
            return {}
        numbers = trainer.evaluate(held).to_dict()
        if isinstance(self.task, CausalTask):
            numbers["perplexity"] = perplexity(numbers["loss"])
        return {n: float(v) for n, v in numbers.items()}

    def _first_texts(self, say: PrintLine) -> tuple[list[list[int]], list[list[int]]]:
        """Return the prompts, and what the untrained model writes; neither if it cannot be run.

        Training computes in float32 what the processor lacks kernels for, the file itself does not.
        """
        task = self.task
        if not isinstance(task, CausalTask) or not self.options.sample_tokens:
            return [], []
        try:
            decoder = make_decoder(self.folder, threads=self.options.threads)
        except OnnxTrainError as error:
            reason = str(error).splitlines()[0]
            task.notes.append(f"no samples: the model does not run here: {reason}")
            say(f"note: {task.notes[-1]}")
            return [], []
        prompts = task.prompts()
        return prompts, self._texts(decoder, prompts)

    def _texts(self, decoder: Decoder, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the tokens that a model writes after each prompt, the likeliest ones."""
        most = self.options.sample_tokens
        room = self.folder.max_positions
        assert isinstance(self.task, CausalTask)
        ends = self.task.ends()
        return [
            generate_tokens(
                decoder,
                p,
                most if room is None else max(0, min(most, room - len(p))),
                Sampling(),
                ends,
            )
            for p in prompts
        ]

    def _samples(
        self, prompts: Sequence[list[int]], first: Sequence[list[int]], output: Path
    ) -> tuple[Sample, ...]:
        """Return the samples as text; the trained model is the merged one, as it will be served."""
        if not prompts:
            return ()
        merged = output / "merged" / self.folder.path.name
        last = self._texts(make_decoder(merged, threads=self.options.threads), prompts)
        pairs = zip(prompts, first, last, strict=True)
        return tuple(Sample(*map(self._text, row)) for row in pairs)

    def _text(self, ids: Sequence[int]) -> str:
        tokenizer = self.task.tokenizer
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)

    def _check_settings(self, output: Path) -> None:
        """Refuse to go on with a run that was asked for otherwise."""
        path = output / SETTINGS
        if not self.options.resume or not path.is_file():
            return
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise OnnxTrainError(f"{str(path)!r}: cannot be read: {error}") from error
        now = json.loads(json.dumps(self._settings))
        changed = [n for n in now if n in stored and stored[n] != now[n]]
        if changed:
            listing = ", ".join(f"{n} was {stored[n]!r}, not {now[n]!r}" for n in changed)
            raise OnnxTrainError(
                f"{output}: this run was begun otherwise: {listing}\n"
                "hint: resume with the same options, or choose another folder"
            )

    def _report(self, result: FineTuneResult, output: Path, say: PrintLine) -> None:
        if result.after:
            say(f"after: {_format_metrics(result.after)}")
        for s in result.samples:
            say(f"prompt: {s.prompt!r}\n  before: {s.before!r}\n  after:  {s.after!r}")
        for name, what in result.files.items():
            say(f"{output / name}: {what}")
        report = {
            "before": result.before,
            "after": result.after,
            "samples": [dataclasses.asdict(s) for s in result.samples],
            "files": result.files,
            "notes": list(result.notes),
            "stopped": result.history.stopped,
        }
        write_json(output / REPORT, report)


def _format_metrics(numbers: dict[str, float]) -> str:
    shown = {n: v for n, v in numbers.items() if n != "samples"}
    return ", ".join(f"{n} {v:.4g}" for n, v in shown.items())


def _line_printer(progress: bool | str) -> PrintLine:
    return display("plain" if progress else False).line
