"""Tokenize text and render chat templates, from the files beside a model."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onnxtrain.errors import LoadError, OnnxTrainError, PrepareError

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Chat template for models without one: a line per message."""


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
        if not path.is_file():
            raise LoadError(
                f"{str(path)!r}: tokenizer not found\n"
                "hint: copy tokenizer.json there, or pass the data as arrays of token ids"
            )
        library = _import_optional("tokenizers")
        try:
            self.inner = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain exceptions
            raise LoadError(f"{str(path)!r}: not a tokenizer: {error}") from error
        self.inner.no_padding()
        self.inner.no_truncation()
        config = _read_json(path.parent / "tokenizer_config.json")
        special = {**_read_json(path.parent / "special_tokens_map.json"), **config}
        self.special = {
            name: text
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _text_of(special.get(name)))
        }
        self._template = _template(path.parent, config)
        self._render: Any = None

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
        encoded = self.inner.encode(text, add_special_tokens=special)
        return Tokens(list(encoded.ids), list(encoded.offsets))

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a pair of texts, and their token type ids."""
        encoded = self.inner.encode(first, second)
        return list(encoded.ids), list(encoded.type_ids)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens."""
        return self.inner.decode(list(ids), skip_special_tokens=not special)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = False) -> str:
        """Render a conversation with the chat template.

        Args:
            messages: dicts with ``role`` and ``content``.
            answer: whether to append the start of an assistant turn (``add_generation_prompt``).

        Raises:
            PrepareError: if the template rejects the messages.
        """
        if self._render is None:
            self._render = _compile_template(self._template or PLAIN_TEMPLATE)
        names = {n: t for n, t in self.special.items() if n in ("bos_token", "eos_token")}
        try:
            return self._render(messages=list(messages), add_generation_prompt=answer, **names)
        except Exception as error:  # a template may raise anything
            raise PrepareError(f"the chat template rejects the messages: {error}") from error


def _compile_template(text: str) -> Any:
    jinja = _import_optional("jinja2")
    sandbox = importlib.import_module("jinja2.sandbox")
    # The environment of transformers' apply_chat_template.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    # Without a date, the same data gives the same tokens on every day.
    environment.globals["strftime_now"] = lambda format: ""
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    try:
        return environment.from_string(text).render
    except jinja.TemplateError as error:
        raise LoadError(f"the chat template cannot be read: {error}") from error


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template of a folder: ``chat_template.jinja`` or an entry of the config."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        by_name = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = by_name.get("default") or next(iter(by_name.values()), None)
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{str(path)!r}: cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


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
