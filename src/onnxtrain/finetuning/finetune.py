"""``finetune``: data, adapters, training, evaluation, samples and output files in one call.

In this order: the files that a run writes, its progress display and metrics, then ``finetune`` and
``FineTuneRun``, which runs the steps. The model is loaded and checked once, in ``inspect_model``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters import Adapted, lora
from onnxtrain.adapters.ort_adapter import save_with_external_references
from onnxtrain.artifacts import Artifacts
from onnxtrain.artifacts.build import build
from onnxtrain.errors import OnnxTrainError, SaveError, by_caller
from onnxtrain.finetuning.arguments import FineTuneOptions
from onnxtrain.finetuning.preference import PreferenceTask
from onnxtrain.finetuning.tasks import (
    CausalTask,
    ClassificationTask,
    EmbeddingTask,
    RegressionTask,
    TaggingTask,
    Task,
    VisionTask,
)
from onnxtrain.graph.io import CheckedModel, load
from onnxtrain.graph.io.external_data import move_to_file, release_memory
from onnxtrain.graph.io.limits import JSON_BYTES, read_json, read_regular
from onnxtrain.graph.io.writer import as_save_error, bytes_writer, write_files
from onnxtrain.importer import expose_weights
from onnxtrain.options import from_arguments, recorded_options
from onnxtrain.planning import plan
from onnxtrain.planning.memory_plan import format_bytes
from onnxtrain.runtime.devices import find as find_device
from onnxtrain.text.data import TokenBatches
from onnxtrain.text.generate import Decoder, Sampling, generate_tokens, make_decoder
from onnxtrain.text.model_folder import LINK_HINT, ModelFolder, files_root, inspect_model
from onnxtrain.training import Trainer
from onnxtrain.training.callbacks import Callback, Record
from onnxtrain.training.distributed import join, restarts
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
"""Files beside a model that inference needs."""


def write_outputs(
    weights: Trainer | Mapping[str, np.ndarray],
    adapted: Adapted | None,
    folder: ModelFolder,
    output: Path,
    *,
    requantize: bool = False,
) -> dict[str, str]:
    """Write the trained model; return a description of each file or folder.

    Args:
        weights: the trained weights by name; a trainer, unless the model is a language model.
        adapted: the model with adapters, if there are any.
        folder: the original model.
        output: the output folder.
        requantize: merge adapters into quantized weights.

    Language models with adapters: ``peft/``, ``adapter.onnx_adapter`` with ``base/``, ``merged/``.
    Other models with adapters: ``peft/`` and ``merged/``. Without adapters: ``merged/`` only.
    """
    written: dict[str, str] = {}
    merged = output / "merged" / folder.path.name
    merged.parent.mkdir(parents=True, exist_ok=True)
    if adapted is not None and adapted.peft_problem is None:
        adapted.export_peft(output / "peft", weights, task_type=_PEFT_TASK_TYPES.get(folder.kind))
        written["peft/"] = "adapters for PEFT"
    if adapted is not None and folder.kind == "causal_lm":
        if not adapted.dora:
            adapted.export_ort_adapter(output / "adapter.onnx_adapter", weights)
            base = output / "base" / folder.path.name
            base.parent.mkdir(parents=True, exist_ok=True)
            adapted.export_ort_base(base)
            copy_companion_files(folder, base.parent)
            written["adapter.onnx_adapter"] = "adapters for onnxruntime and onnxruntime-genai"
            written["base/"] = "base model for adapter.onnx_adapter"
        quantized = "requantize" if requantize else "branch"
        report = adapted.export_merged(merged, weights, quantized=quantized)
        written["merged/"] = f"model for inference; {report}"
    elif isinstance(weights, Mapping):
        save_with_external_references(with_trained_weights(folder, weights), merged)
        written["merged/"] = "model for inference, with the trained weights"
    else:
        weights.export(merged)
        written["merged/"] = "model for inference, with the trained weights"
    copy_companion_files(folder, merged.parent)
    return written


def with_trained_weights(folder: ModelFolder, weights: Mapping[str, np.ndarray]) -> ir.Model:
    """Return the original model, including its KV cache, with the trained weights."""
    model, _ = expose_weights(load(folder.model))
    for name, array in weights.items():
        x = model.graph.initializers[name]
        assert x.const_value is not None
        dtype = x.const_value.dtype
        x.const_value = ir.Tensor(array.astype(dtype.numpy()), dtype, name=name)
    return model


_PEFT_TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "classification": "SEQ_CLS",
    "embeddings": "FEATURE_EXTRACTION",
    "regression": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
}


def copy_companion_files(folder: ModelFolder, target: Path) -> None:
    """Copy the tokenizer and configuration files of a model to another folder."""
    root = files_root(folder.folder)
    for name in _COMPANION_FILES:
        source = folder.folder / name
        if not os.path.lexists(source):
            continue
        try:
            data = read_regular(source, JSON_BYTES, within=root)
        except OSError as error:
            raise SaveError(f"{str(source)!r}: {error.strerror}\n{LINK_HINT}") from error
        write_files(repr(str(target / name)), {str((target / name).absolute()): bytes_writer(data)})


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_files(repr(str(path)), {str(path.absolute()): bytes_writer(text.encode())})


_WARMUP_STEPS = 2  # The first steps allocate memory; a CUDA step is captured in the second one.


class TokenDisplay:
    """A progress display that counts tokens instead of samples."""

    def __init__(self, inner: Display, batches: TokenBatches) -> None:
        self._inner, self._batches, self._tokens = inner, batches, 0

    def start(self, epochs: int, total: int | None, done: int) -> None:
        """Start the display."""
        self._tokens = self._batches.tokens
        self._inner.start(epochs, total, done)

    def step(self, epoch: int, loss: float, lr: float, samples: int) -> None:
        """Update the display after a batch."""
        new, self._tokens = self._batches.tokens - self._tokens, self._batches.tokens
        self._inner.step(epoch, loss, lr, new)

    def line(self, text: str) -> None:
        """Print a message."""
        self._inner.line(text)

    def stop(self) -> None:
        """Stop the display."""
        self._inner.stop()


class ThroughputReporter(Callback):
    """Print the time per batch and the remaining time after the first batches."""

    def __init__(self, batches: TokenBatches) -> None:
        self._batches = batches
        self._started = self._steps = self._tokens = 0.0
        self.seconds: float | None = None
        """Seconds per batch."""
        self.tokens_per_second: float | None = None
        self._reported = False

    def on_start(self, run: Run) -> None:
        """Reset the number of steps."""
        self._steps = 0

    def on_step(self, run: Run, result: StepResult) -> None:
        """Measure all batches after the warm-up."""
        self._steps += 1
        now = time.perf_counter()
        if self._steps == _WARMUP_STEPS:
            self._started, self._tokens = now, self._batches.tokens
        if self._steps <= _WARMUP_STEPS:
            return
        measured = self._steps - _WARMUP_STEPS
        self.seconds = (now - self._started) / measured
        self.tokens_per_second = (self._batches.tokens - self._tokens) / (now - self._started)
        if not self._reported and self._steps == _WARMUP_STEPS + 2:
            self._reported = True
            remaining = "" if run.batches is None else self._remaining(run)
            run.show.line(
                f"{self.seconds:.2f} s per batch, {self.tokens_per_second:,.0f} "
                f"{self._batches.unit}/s{remaining}"
            )

    def _remaining(self, run: Run) -> str:
        assert run.batches is not None
        batches = run.batches * run.epochs - (run.epoch * run.batches + run.batch)
        minutes, seconds = divmod(round(batches * (self.seconds or 0.0)), 60)
        return f", {minutes} min {seconds:02d} s remaining"


def show_perplexity(run: Run, record: Record) -> None:
    """Print the validation perplexity of an epoch."""
    if "val_loss" in record:
        run.show.line(f"  validation: perplexity {perplexity(record['val_loss']):.4g}")


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``; infinity if that overflows.

    >>> perplexity(0.0), perplexity(1e9)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


PrintLine = Callable[[str], None]

SETTINGS, REPORT = "finetune.json", "report.json"
_TASK_CLASSES = {
    "causal_lm": CausalTask,
    "classification": ClassificationTask,
    "embeddings": EmbeddingTask,
    "regression": RegressionTask,
    "token_classification": TaggingTask,
    "vision": VisionTask,
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """Generated text for a prompt, before and after training."""

    prompt: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class FineTuneResult:
    """Results of a fine-tuning run."""

    history: History
    before: dict[str, float]
    """Validation loss and metrics before training; empty without validation data."""
    after: dict[str, float]
    """Validation loss and metrics after training."""
    samples: tuple[Sample, ...]
    files: dict[str, str]
    """Files and folders in the output folder -> description."""
    notes: tuple[str, ...]
    """Warnings about the model and the data."""


def finetune(
    model: str | os.PathLike[str],
    data: Any,
    output: str | os.PathLike[str],
    *,
    kind: str | None = None,
    method: str = "sft",
    beta: float | None = None,
    cache_reference: bool = False,
    validation: Any = None,
    tokenizer: Any = None,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    lora_blocks: bool = False,
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
    """Fine-tune an ONNX model on text or images; write adapters and a merged model.

    Files of the original model do not change. Errors in model, data or options are raised before
    the first step.

    Args:
        model: an ``.onnx`` file, or a folder written by onnxruntime-genai or optimum.
        data: a file (``.jsonl``, ``.json``, ``.csv``, plain text), a list of records or texts, or
            token ids (``{"input_ids": ..., "labels": ...}``). For vision models: a folder with one
            folder of images per class, a table with columns ``image`` and ``label``, or a dict with
            arrays for the input and ``labels``.
        output: the output folder: ``peft/``, ``adapter.onnx_adapter``, ``merged/``, ``run/``.
        kind: ``"causal_lm"``, ``"classification"``, ``"embeddings"``, ``"regression"``,
            ``"token_classification"`` or ``"vision"``. Default:
            detected from the files.
        method: ``"sft"`` trains language models on texts or answers; ``"dpo"``, ``"ipo"`` and
            ``"orpo"`` on records with ``prompt``, ``chosen`` and ``rejected``; ``"kto"`` on records
            with ``prompt``, ``completion`` and ``label``.
        beta: weight of the reference in dpo, ipo and kto, and of the odds in orpo. Default: 0.1.
        cache_reference: compute the log-probabilities of the reference of dpo, ipo and kto once
            before training. Default: with adapters, each step computes them without the adapters.
        validation: a validation file, or a fraction of the data. Default: 0.05.
        tokenizer: the folder of the tokenizer. Default: the folder of the model.
        lora_rank: rank of the LoRA adapters; 0 trains the weights themselves. Default: 8 for
            language models, 0 for other models.
        lora_alpha: adapters are scaled by ``alpha / rank``. Default: twice the rank.
        lora_blocks: adapters that merge into quantized weights without rounding, see
            :func:`onnxtrain.lora`.
        targets: layers that get an adapter, see :func:`onnxtrain.lora`. Default: ``"attention"``.
        train: weights to train without adapters: ``"bias"``, ``"norm"``, ``"last:2"``, names or
            globs. Default: all weights.
        epochs: number of training epochs.
        batch_size: examples per batch.
        accumulate: gradient accumulation steps.
        lr: learning rate. Default: 2e-4 for adapters, 2e-5 for weights.
        schedule: learning rate schedule.
        warmup: warm-up steps, or a fraction of all steps if below 1.
        optimizer: name of the optimizer.
        clip: maximum gradient norm.
        max_length: maximum number of tokens per example. Default: 512, or the model's limit if that
            is lower.
        pack: pack several examples into one sequence of ``max_length``.
        learn_prompts: also train on prompts and user messages, not only on answers.
        recompute: activation checkpointing, see :func:`onnxtrain.build`.
        prompts: prompts to generate samples from before and after training. Default: the beginnings
            of two examples.
        sample_tokens: number of tokens per sample; 0 for no samples.
        requantize: merge adapters into quantized weights and quantize again. Default: the merged
            model has them as branches.
        checkpoint_every: steps between checkpoints; every epoch ends with a checkpoint too.
        resume: resume from the last checkpoint in ``output``, with the same options. ``epochs`` may
            be larger.
        seed: random seed for adapters, dropout and shuffling.
        device: as in :class:`~onnxtrain.Trainer`.
        threads: number of CPU threads. Default: all cores.
        progress: ``True``, ``"bar"``, ``"plain"`` or ``False``.

    Raises:
        LoadError: if the model, the tokenizer or the data cannot be read.
        PrepareError: if the options, the data and the model do not fit together.
    """
    options = from_arguments(FineTuneOptions, locals())
    return FineTuneRun(model, data, options).run(Path(output))


class FineTuneRun:
    """A fine-tuning run: ``__init__`` loads model and data, :meth:`run` trains and writes files."""

    def __init__(self, model: str | os.PathLike[str], data: Any, options: FineTuneOptions) -> None:
        self.folder: ModelFolder = inspect_model(model, options.kind)
        move_to_file(self.folder.model.model)  # weights of all models of the run, in memory once
        self.options = options.completed(self.folder.kind)
        task = PreferenceTask if self.options.method != "sft" else _TASK_CLASSES[self.folder.kind]
        self.task: Task = task(self.folder, self.options, data)
        self._settings = {
            **recorded_options(self.options),
            "model": os.path.abspath(self.folder.path),
            "data": os.fsdecode(data) if isinstance(data, str | os.PathLike) else "given",
        }

    def build(self) -> tuple[Adapted | None, Artifacts]:
        """Return the model with adapters, if there are any, and its training artifacts."""
        o, task = self.options, self.task
        source = task.model()
        adapted = None
        train = o.train
        if train is not None and task.trained:
            train = [*([train] if isinstance(train, str) else train), *task.trained]
        if o.lora_rank:
            adapted = lora(
                source,
                o.lora_rank,
                o.lora_alpha or 1.0,
                o.targets,
                blocks=o.lora_blocks,
                seed=o.seed,
            )
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
            target=find_device(o.device).target,
        )
        if adapted is not None:
            task.notes += _adapter_notes(adapted, artifacts)
        return adapted, artifacts

    def plan(self, adapted: Adapted | None, artifacts: Artifacts) -> list[str]:
        """Return a summary of the run, to print before training."""
        o, folder = self.options, self.folder
        trainable = sum(artifacts.values[p.name].size for p in artifacts.manifest.parameters)
        what = "weights" if adapted is None else f"LoRA adapters of rank {o.lora_rank}"
        lines = [
            f"model: {folder.path} ({folder.kind}, detected from {folder.reason})",
            f"data: {self.task.summary()}",
            f"trainable parameters: {trainable:,} in {len(artifacts.manifest.parameters)} tensors, "
            + what,
            f"run: {o.epochs} epochs, batch size {o.batch_size}"
            + (f" x {o.accumulate}" if o.accumulate > 1 else "")
            + f", {o.optimizer}, lr {o.lr:g}, {o.schedule}",
            *self._memory(artifacts),
        ]
        return [*lines, *(f"note: {n}" for n in dict.fromkeys(self.task.notes))]

    def _memory(self, artifacts: Artifacts) -> list[str]:
        """Return a line with the peak memory of the largest batch; the estimate is for the CPU."""
        if self.options.device != "cpu":
            return []
        sizes, description = self.task.memory_sizes()
        planned = plan(artifacts, **sizes)
        release_memory()
        return [f"memory: about {format_bytes(planned.peak_here)} at {description}"]

    def run(self, output: Path) -> FineTuneResult:
        """Train, and write results to a folder: worker 0 does, if torchrun has started several."""
        o, task = self.options, self.task
        workers = join("auto", o.device)
        main = workers is None or workers.main
        say = _line_printer(o.progress if main else False)
        if main:
            self._check_output(output)
            self._check_settings(output)
        adapted, artifacts = self.build()
        for line in self.plan(adapted, artifacts):
            say(line)
        if main:
            with as_save_error(str(output)):
                output.mkdir(parents=True, exist_ok=True)
            write_json(output / SETTINGS, self._settings)
        prompts, texts_before = self._generate_before(say) if main else ([], [])
        weights, history, before, after = self._train(artifacts, output, say)
        del artifacts  # exports and samples take as much memory as the step did
        release_memory()
        if not main:
            return FineTuneResult(history, {}, {}, (), {}, tuple(dict.fromkeys(task.notes)))
        files = write_outputs(weights, adapted, self.folder, output, requantize=bool(o.requantize))
        if isinstance(task, ClassificationTask | TaggingTask | VisionTask):
            write_json(output / "labels.json", dict(enumerate(task.classes)))
            files["labels.json"] = "class names by index"
        samples = self._samples(prompts, texts_before, output)
        notes = tuple(dict.fromkeys(task.notes))
        result = FineTuneResult(history, before, after, samples, files, notes)
        self._report(result, output, say)
        return result

    def _train(
        self, artifacts: Artifacts, output: Path, say: PrintLine
    ) -> tuple[Trainer | dict[str, np.ndarray], History, dict[str, float], dict[str, float]]:
        """Return the trained weights, the history, and the metrics before and after."""
        o, task = self.options, self.task
        trainer = Trainer(
            artifacts, device=o.device, seed=o.seed, threads=o.threads, distributed="auto"
        )
        main = trainer.workers is None or trainer.workers.main
        artifacts.release_arrays()
        release_memory()
        validation = task.batches(trainer.inputs, validation=True)
        before = self._evaluate(trainer, validation) if main else {}
        if before:
            say(f"before: {_format_metrics(before)}")
        try:
            history = self._fit(trainer, output, validation)
        except KeyboardInterrupt as interrupt:
            saved, hint, _ = str(interrupt).partition("\nhint: ")
            python = f"finetune(..., {str(output)!r}, resume=True) continues"
            hint += by_caller(python, "the same command with --resume continues")
            raise KeyboardInterrupt(f"{saved}{hint}") from interrupt
        after = self._evaluate(trainer, validation) if main else {}
        language_model = self.folder.kind == "causal_lm"
        weights = dict(trainer.parameters) if language_model else trainer
        return weights, history, before, after

    def _fit(self, trainer: Trainer, output: Path, validation: Any) -> History:
        o, task = self.options, self.task
        batches = task.batches(trainer.inputs)
        assert batches is not None
        callbacks: list[Any] = [ThroughputReporter(batches)]
        if isinstance(task, CausalTask):
            callbacks.append(show_perplexity)
        progress = display(o.progress, unit=batches.unit)
        return trainer.fit(
            batches,
            epochs=o.epochs,
            batch_size=o.batch_size,
            lr=o.lr,
            schedule=o.schedule,
            warmup=o.warmup,
            validation=validation,
            callbacks=callbacks,
            progress=TokenDisplay(progress, batches) if o.progress else False,
            directory=output / "run",
            resume=o.resume or restarts() > 0,
            checkpoint_every=o.checkpoint_every,
        )

    def _evaluate(self, trainer: Trainer, validation: Any) -> dict[str, float]:
        """Return loss and metrics on the validation data; empty without validation data."""
        if validation is None:
            return {}
        metrics = trainer.evaluate(validation).to_dict()
        if isinstance(self.task, CausalTask):
            metrics["perplexity"] = perplexity(metrics["loss"])
        return {n: float(v) for n, v in metrics.items()}

    def _generate_before(self, say: PrintLine) -> tuple[list[list[int]], list[list[int]]]:
        """Return prompts and generated tokens of the original model; empty if it does not run.

        Training may still work: ``build`` upcasts 16-bit nodes that have no CPU kernel.
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
        return prompts, self._generate(decoder, prompts)

    def _generate(self, decoder: Decoder, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the tokens that a model generates for each prompt, by greedy decoding."""
        max_positions = self.folder.max_positions
        assert isinstance(self.task, CausalTask)
        stop = self.task.stop_token_ids()
        generated = []
        for prompt in prompts:
            max_tokens = self.options.sample_tokens
            if max_positions is not None:
                max_tokens = max(0, min(max_tokens, max_positions - len(prompt)))
            generated.append(generate_tokens(decoder, prompt, max_tokens, Sampling(), stop))
        return generated

    def _samples(
        self, prompts: Sequence[list[int]], before: Sequence[list[int]], output: Path
    ) -> tuple[Sample, ...]:
        """Return the samples as text, after training from the merged model that was written."""
        if not prompts:
            return ()
        merged = output / "merged" / self.folder.path.name
        after = self._generate(make_decoder(merged, threads=self.options.threads), prompts)
        rows = zip(prompts, before, after, strict=True)
        return tuple(Sample(*map(self._decode, row)) for row in rows)

    def _decode(self, ids: Sequence[int]) -> str:
        tokenizer = self.task.tokenizer
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)

    def _check_output(self, output: Path) -> None:
        """Check that the output folder is a folder, without links that lead out of it.

        Model files and tokenizers are written into folders of it.
        """
        if os.path.lexists(output) and not output.is_dir():
            raise SaveError(
                f"{output}: the output is a file, not a folder\n"
                f"hint: {by_caller('pass another folder as output', '-o FOLDER')}"
            )
        names = ("run", "peft", "base", "merged")
        paths = (p for n in names for p in (output / n, *(output / n).rglob("*")))
        link = next((p for p in paths if p.is_symlink()), None)
        if link is not None:
            raise SaveError(f"{link}: the output folder has a link\nhint: remove {link}")

    def _check_settings(self, output: Path) -> None:
        """Check that a resumed run has the options of the original run."""
        path = output / SETTINGS
        if not self.options.resume or not path.is_file():
            return
        try:
            stored = read_json(path, within=output)
        except (OSError, ValueError) as error:
            raise OnnxTrainError(f"{str(path)!r}: cannot be read: {error}") from error
        if not isinstance(stored, dict):
            raise OnnxTrainError(f"{str(path)!r}: not the settings of a run")
        now = json.loads(json.dumps(self._settings))
        changed = [n for n in now if n in stored and stored[n] != now[n]]
        if changed:
            listing = ", ".join(f"{n} was {stored[n]!r}, now {now[n]!r}" for n in changed)
            raise OnnxTrainError(
                f"{output}: cannot resume, options changed: {listing}\n"
                "hint: resume with the original options, or use another output folder"
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


def _adapter_notes(adapted: Adapted, artifacts: Artifacts) -> list[str]:
    """Return what users should know about the adapters of a run."""
    notes = list(adapted.notes)
    trained = {p.name for p in artifacts.manifest.parameters}
    unused = [a.module for a in adapted.adapters if trained.isdisjoint(a.parameters)]
    if unused:
        more = ", ..." if len(unused) > 3 else ""
        notes.append(
            f"{len(unused)} adapters do not train, the loss does not depend on them: "
            f"{', '.join(unused[:3])}{more}"
        )
    if adapted.peft_problem is not None:
        notes.append(f"no peft/: {adapted.peft_problem}")
    return notes


def _format_metrics(metrics: dict[str, float]) -> str:
    return ", ".join(f"{n} {v:.4g}" for n, v in metrics.items() if n != "samples")


def _line_printer(progress: bool | str) -> PrintLine:
    return display("plain" if progress else False).line
