"""Pass model folders with damaged settings, tokenizers and templates to `finetune`."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from onnxtrain.errors import OnnxTrainError
from onnxtrain.finetuning import FineTuneOptions, FineTuneRun
from onnxtrain.finetuning.finetune import copy_companion_files
from onnxtrain.text import inspect_model, tokenizer
from onnxtrain.text.generate import make_decoder
from tests.hostile.mutate_files import change, damage_bytes, replace_file
from tests.hostile.run import Step, WrongError
from tests.hostile.traps import SECRET, Traps
from tests.text.models import genai_folder, llama
from tests.text.words import CHATML, write_tokenizer

_FILES = (
    *("genai_config.json", "config.json", "generation_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.txt"),
    "preprocessor_config.json",
)
_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 128,
    "vocab_size": 96,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "head_dim": 16,
    "text_config": {"n_positions": 128, "vocab_size": 96},
}
_TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set x = namespace(t='ab') %}{% for i in range(60) %}{% set x.t = x.t * 2 %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    *(
        "{{ lipsum(n=10 ** 7) }}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ 9 ** 9**9 }}",
    ),
    *("{{ messages.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{% include 'x' %}"),
    *("{% for %}", "{{ 1 / 0 }}", "{{ messages[99].content }}", "", "\ud7ff\u2028", "{{ x.y.z }}"),
    *("{{ raise_exception(messages) }}", "{{ messages | tojson }}", "{{ strftime_now(1) }}"),
    "{% import '../outside/secret.bin' as x %}",
)
ROWS = [
    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "meow"}]},
    {
        "messages": [
            {"role": "user", "content": "the dog"},
            {"role": "assistant", "content": "woof"},
        ]
    },
]
_BASE: dict[Path, Path] = {}


def steps_of_case(seed: int, traps: Traps) -> tuple[str, Iterator[Step]]:
    """Return the name of a case, the file that is damaged, and the entry points to call."""
    rng = random.Random(seed)
    tokenizer._TEMPLATE_SECONDS = 3.0
    folder = traps.inside / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_base(traps), folder)
    name = rng.choice(_FILES)
    _damage(rng, folder / name, traps)
    traps.touched()
    return name, _steps(folder, traps)


def _base(traps: Traps) -> Path:
    if traps.inside not in _BASE:
        folder = traps.inside / "base"
        genai_folder(write_tokenizer(folder), llama(layers=1))
        (folder / "config.json").write_text(json.dumps(_CONFIG))
        (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
        (folder / "chat_template.jinja").write_text(CHATML)
        _BASE[traps.inside] = folder
    return _BASE[traps.inside]


def _damage(rng: random.Random, path: Path, traps: Traps) -> None:
    if path.suffix == ".jinja" and rng.random() < 0.7:
        path.write_text(rng.choice(_TEMPLATES), encoding="utf-8", errors="replace")
        return
    if not path.exists():
        path.write_text("{}")
    match rng.randrange(6):
        case 0:
            replace_file(rng, path, traps)
        case 1:
            damage_bytes(rng, path)
        case 2:
            deep = "[" * 99_999, '{"a":' * 9999, "9" * 9999, '"\\ud800"', "null", "[]"
            path.write_text(rng.choice(deep))
        case _ if path.suffix == ".json":
            tree = json.loads(path.read_text())
            for _ in range(rng.choice((1, 1, 2, 3))):
                change(rng, tree)
            path.write_text(json.dumps(tree))
        case _:
            damage_bytes(rng, path)


def _steps(folder: Path, traps: Traps) -> Iterator[Step]:
    yield "inspect_model", lambda: inspect_model(folder)
    runs: list[FineTuneRun] = []
    options = FineTuneOptions(progress=False, max_length=64)
    yield "FineTuneRun", lambda: runs.append(FineTuneRun(folder, ROWS, options))
    for run in runs:
        yield "preview", run.task.preview
        yield "decode", lambda run=run: _decode(run)
        yield "copy", lambda run=run: _copy(run, traps)


def _decode(run: FineTuneRun) -> None:
    if run.folder.kind == "causal_lm":
        make_decoder(run.folder, threads=1).next_logits([1, 2])
        text = run._decode([1, 2, 3])
        assert isinstance(text, str)


def _copy(run: FineTuneRun, traps: Traps) -> None:
    target = traps.inside / "copies"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    with contextlib.suppress(OnnxTrainError):
        copy_companion_files(run.folder, target)
    secret = np.float32(SECRET).tobytes() * 4
    for file in target.iterdir():
        if file.is_symlink() or secret in file.read_bytes():
            raise WrongError(f"{file.name} was published")
