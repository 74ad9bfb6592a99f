"""Tokenize text and render chat templates, from the files beside a model."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onnxtrain.errors import LoadError, OnnxTrainError, PrepareError
from onnxtrain.graph.io.limits import JSON_BYTES, MIB, OutsideError, read_regular
from onnxtrain.text.model_folder import LINK_HINT, files_root, read_settings

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Chat template for models without one: a line per message."""
_TEMPLATE_BYTES = MIB


class Tokens(NamedTuple):
    """Token ids, and the character span of each in the text."""

    ids: list[int]
    spans: list[tuple[int, int]]


class Tokenizer:
    """A fast tokenizer with special tokens and a chat template.

    Args:
        folder: the folder of ``tokenizer.json``; ``tokenizer_config.json``,
            ``chat_template.jinja`` and ``special_tokens_map.json`` are optional.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json" if self.folder.is_dir() else self.folder
        if not os.path.lexists(path):
            raise LoadError(
                f"{str(path)!r}: tokenizer not found\n"
                "hint: copy tokenizer.json there, or pass the data as arrays of token ids"
            )
        library = _import_optional("tokenizers")
        data = _read_file(path, JSON_BYTES)
        with _library_errors(f"{str(path)!r}: not a tokenizer", LoadError):
            self.inner = library.Tokenizer.from_buffer(data)
            self.inner.no_padding()
            self.inner.no_truncation()
        config = read_settings(path.parent / "tokenizer_config.json")
        special = {**read_settings(path.parent / "special_tokens_map.json"), **config}
        self.special = {
            name: text
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _text_of(special.get(name)))
        }
        self._template = _template(path.parent, config)
        self._chat: ChatTemplate | None = None

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    @property
    def size(self) -> int:
        """One more than the largest token id."""
        return max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def id_of(self, name: str) -> int | None:
        """Return the id of a special token such as ``"eos_token"``, if it exists."""
        text = self.special.get(name)
        return None if text is None else self.inner.token_to_id(text)

    def special_ids(self) -> set[int]:
        """Return the ids of all special tokens."""
        added = self.inner.get_added_tokens_decoder()
        return {int(i) for i, token in added.items() if token.special}

    def encode(self, text: str, *, special: bool = True) -> Tokens:
        """Return the tokens of a text; ``special`` adds special tokens such as BOS."""
        with _library_errors("the tokenizer cannot encode a text", PrepareError):
            encoded = self.inner.encode(text, add_special_tokens=special)
        return Tokens(list(encoded.ids), list(encoded.offsets))

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a pair of texts, and their token type ids."""
        with _library_errors("the tokenizer cannot encode a text", PrepareError):
            encoded = self.inner.encode(first, second)
        return list(encoded.ids), list(encoded.type_ids)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens."""
        with _library_errors("the tokenizer cannot decode tokens", PrepareError):
            return self.inner.decode(list(ids), skip_special_tokens=not special)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = False) -> str:
        """Render a conversation with the chat template.

        Args:
            messages: dicts with ``role`` and ``content``.
            answer: whether to append the start of an assistant turn (``add_generation_prompt``).

        Raises:
            PrepareError: if the template rejects the messages.
        """
        if self._chat is None:
            self._chat = ChatTemplate(self._template or PLAIN_TEMPLATE)
        names = {n: t for n, t in self.special.items() if n in ("bos_token", "eos_token")}
        return self._chat.render(messages=list(messages), add_generation_prompt=answer, **names)


_TEMPLATE_SECONDS = 10.0  # for one text; a conversation takes about a millisecond


class ChatTemplate:
    """A chat template, rendered in a process of its own with limited time and memory.

    Args:
        source: the Jinja template.

    Raises:
        LoadError: if it is not a template.
    """

    def __init__(self, source: str) -> None:
        _import_optional("jinja2")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("template_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
            encoding="ascii",
        )
        weakref.finalize(self, _stop, self._process)
        answer = self._ask(source)
        if "error" in answer:
            raise LoadError(f"the chat template cannot be read: {answer['error']}")

    def render(self, **variables: Any) -> str:
        """Return the text for variables such as ``messages``.

        Raises:
            PrepareError: if the template raises an error, or needs too much time or memory.
        """
        answer = self._ask(variables)
        if "error" in answer:
            raise PrepareError(f"the chat template rejects the messages: {answer['error']}")
        return answer["text"]

    def _ask(self, request: Any) -> dict[str, str]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line, timer = "", threading.Timer(_TEMPLATE_SECONDS, process.kill)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # the process ended
                process.stdin.write(json.dumps(request, default=str) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            reason = f"it takes more than {_TEMPLATE_SECONDS:g} seconds, or too much memory"
            return {"error": f"{reason}\nhint: put another chat_template.jinja beside the model"}
        return json.loads(line)


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a folder: ``chat_template.jinja`` or an entry of the config."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        try:
            return _read_file(path, _TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise LoadError(f"{str(path)!r}: not UTF-8: {error.reason}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        named = [t for t in template if isinstance(t, dict)]
        default = [t for t in named if t.get("name") == "default"]
        template = next((t.get("template") for t in (*default, *named)), None)
    return template if isinstance(template, str) else None


def _read_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file of a model folder."""
    try:
        return read_regular(path, max_bytes, within=files_root(path.parent))
    except OutsideError as error:
        raise LoadError(f"{str(path)!r}: {error.strerror}\n{LINK_HINT}") from error
    except OSError as error:
        raise LoadError(f"{str(path)!r}: cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def _library_errors(what: str, kind: type[OnnxTrainError]) -> Generator[None]:
    """Raise errors of ``tokenizers`` as ours; its panics are no ``Exception``."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {error}") from error


def _text_of(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _import_optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OnnxTrainError(
            f'{name} is not installed\nhint: pip install "onnxtrain[text]"'
        ) from error


__all__ = ["PLAIN_TEMPLATE", "Tokenizer", "Tokens"]
