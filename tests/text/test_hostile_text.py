"""Texts train as they are written; templates and configurations of others have limits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import onnxtrain
from onnxtrain.errors import LoadError, OnnxTrainError, PrepareError
from onnxtrain.text import Tokenizer, from_arrays, inspect_model, read_records, tokenizer
from tests.text.models import genai_folder, llama
from tests.text.words import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers", reason="the extra onnxtrain[text] is not installed")
    return genai_folder(write_tokenizer(tmp_path / "model"), llama(layers=1))


def texts(path: Path) -> list[tuple[int, str]]:
    return [(r.line, r.fields["text"]) for r in read_records(path).records]


def test_csv_cells_with_newlines_train_as_written(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,label\n"hello\nworld",a\n"two\r\n\r\nlines",b\nlast,c\n')
    assert texts(path) == [(2, "hello\nworld"), (4, "two\r\n\r\nlines"), (7, "last")]


def test_a_quote_that_is_not_closed_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text\nfirst\n"second\nthird\nfourth\n')
    with pytest.raises(LoadError, match=r"line 3: unexpected end of data\nhint: a quoted cell"):
        read_records(path)


def test_csv_rows_with_too_many_cells_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text\nyes\nyes, but\nno\n")
    read = read_records(path)
    assert len(read.records) == 2
    assert "line 3: has 2 cells, expected 1" in read.note()


def test_separators_inside_json_texts_do_not_split_records(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\x0cd"
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert texts(path) == [(1, text)]
    plain = tmp_path / "a.txt"
    plain.write_text(f"{text}\n\nnext\n", encoding="utf-8")
    assert texts(plain) == [(1, text), (3, "next")]


def test_damaged_records_are_listed_not_raw_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = ['{"text": "fine"}'] * 5
    rows += ["[" * 100_000, '{"text": "\\ud800"}', '{"text": "a", "label": [1]}']
    path.write_text("\n".join([*rows, '{"text": "a", "label": NaN}']))
    note = read_records(path).note()
    assert "line 6: not JSON (nested too deeply)" in note
    assert "line 7: 'text' is not text" in note
    assert "line 8: 'label' is not a text or a number; line 9: 'label' is not" in note
    path = tmp_path / "a.json"
    path.write_text("[" * 100_000)
    with pytest.raises(LoadError, match="nested too deeply"):
        read_records(path)
    os.mkfifo(tmp_path / "b.json")
    with pytest.raises(LoadError, match="cannot be read: not a regular file"):
        read_records(tmp_path / "b.json")


def test_rows_of_tokens_without_a_token_to_train_on_are_listed() -> None:
    made = from_arrays([[1, 2], [3], [4, 5]], [[-100, 2], [3], [4, -100]])
    assert made.dropped == (2, 3)
    with pytest.raises(PrepareError, match="no row has a token to train on"):
        from_arrays([[1], [2]], None)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set x = namespace(t='a') %}{% for i in range(60) %}{% set x.t = x.t*2 %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{{ lipsum(n=10 ** 7) }}",
        "{{ '%1000000000d' % 1 }}",
    ],
)
def test_templates_without_end_are_refused(
    folder: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "_TEMPLATE_SECONDS", 1.0)
    (folder / "chat_template.jinja").write_text(template)
    made = Tokenizer(folder)
    for _ in range(2):
        with pytest.raises(OnnxTrainError, match=r"chat template (rejects|cannot be read)"):
            made.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("genai_config.json", '{"model": "x"}', "model must be an object, got 'x'"),
        ("genai_config.json", '{"model": {"decoder": [1]}}', "decoder must be an object"),
        ("genai_config.json", '{"model": {"context_length": -1}}', "context_length must be an"),
        ("genai_config.json", '{"model": {"decoder": {"head_size": 1e9}}}', "head_size must be an"),
        ("config.json", '{"text_config": [1]}', "text_config must be an object"),
        ("config.json", '{"n_positions": true}', "n_positions must be an integer from 1"),
        ("config.json", f'{{"n_positions": {10**40}}}', "n_positions must be an integer from 1"),
        ("config.json", "[]", "the content must be an object"),
        ("config.json", "[" * 100_000, "nested too deeply"),
        ("config.json", b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_settings_of_wrong_types_are_named(
    folder: Path, name: str, content: str | bytes, message: str
) -> None:
    (folder / "genai_config.json").unlink()
    data = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(data)
    with pytest.raises(LoadError, match=message):
        inspect_model(folder / "model.onnx", "causal_lm")


@pytest.mark.parametrize("filename", ["../other.onnx", "/etc/hostname", "link.onnx"])
def test_the_model_of_a_config_stays_in_its_folder(folder: Path, filename: str) -> None:
    (folder / "model.onnx").rename(folder.parent / "other.onnx")
    (folder / "link.onnx").symlink_to("../other.onnx")
    (folder / "genai_config.json").write_text(
        json.dumps({"model": {"decoder": {"filename": filename}}})
    )
    with pytest.raises(LoadError, match="is outside of its folder"):
        inspect_model(folder)


FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja", "genai_config.json"])
def test_files_of_a_model_folder_are_regular_and_stay_in_it(folder: Path, name: str) -> None:
    def refused(message: str) -> None:
        with pytest.raises(LoadError, match=message):
            (inspect_model if name == "genai_config.json" else Tokenizer)(folder)
        (folder / name).unlink()

    secret = folder.parent / "secret"
    secret.write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    refused(f"{name}.*leads out of the folder(.|\n)*hint: copy the file itself")
    os.mkfifo(folder / name)
    refused(f"{name}.*not a regular file")
    (folder / name).write_bytes(b"\xff\xff")
    refused(name if name != "tokenizer.json" else "not a tokenizer")


def test_hugging_face_caches_are_links_to_their_own_blobs(folder: Path) -> None:
    cache = folder.parent / "models--org--name"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for file in sorted(folder.iterdir()):
        os.rename(file, cache / "blobs" / f"sha-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/sha-{file.name}")
    rows = {"input_ids": [[5, 6, 7, 8]] * 4}
    out = folder.parent / "out"
    onnxtrain.finetune(snapshot, rows, out, epochs=1, progress=False, sample_tokens=0)
    for name in ("tokenizer.json", "genai_config.json"):
        copy = out / "merged" / name
        assert not copy.is_symlink()
        assert copy.read_bytes() == (snapshot / name).read_bytes()
