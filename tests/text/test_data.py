"""Records, tokens, masks, packing and batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from onnxtrain.errors import LabelError, LoadError, PrepareError, ShapeError
from onnxtrain.text.data import (
    IGNORE_INDEX,
    Example,
    TokenBatches,
    check_vocabulary,
    collate,
    from_arrays,
    make_examples,
    pack,
    preview,
    read_records,
)
from onnxtrain.text.tokenizer import Tokenizer
from tests.text.words import CHATML, write_lines, write_tokenizer

needs_tokenizers = pytest.mark.usefixtures("tokenizers_installed")
CHAT = [
    {"role": "user", "content": "what does the cat say?"},
    {"role": "assistant", "content": "the cat says meow"},
    {"role": "user", "content": "and the dog?"},
    {"role": "assistant", "content": "the dog says woof"},
]


@pytest.fixture(scope="module")
def tokenizers_installed() -> None:
    pytest.importorskip("tokenizers", reason="the extra onnxtrain[text] is not installed")


@pytest.fixture(scope="module")
def tokenizer(tokenizers_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokens")))


# -- records ----------------------------------------------------------------------------


def test_invalid_lines_are_skipped_and_listed(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "chat.jsonl",
        {"text": "one"},
        "",
        "{broken",
        {"text": "two"},
        {"txet": "?"},
        {"text": "three"},
        {"text": 5},
        {"text": "four"},
    )
    records = read_records(path)
    assert [r.line for r in records.records] == [1, 4, 6, 8]
    assert [line for line, _ in records.skipped] == [2, 3, 5, 7]
    note = records.note()
    assert "skipped 4 of 8 lines: line 2: empty; line 3: not JSON" in note
    assert "line 5: has txet" in note
    assert "line 7: 'text' is not text" in note


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no records"),
        ([{"text": "a"}, "x", "y"], "skipped 2 of 3 lines: line 2"),
        ([{"text": "a"}, {"prompt": "a", "completion": "b"}], "several formats.*line 2.*line 1"),
        (
            [{"messages": [{"role": "user", "content": "hi"}]}],
            "line 1: no message is from the assistant",
        ),
        ([{"messages": "hi"}], "not a list of messages"),
        ([{"messages": [{"role": "user"}]}], "message 1 has no role"),
    ],
)
def test_files_without_usable_records_raise(tmp_path: Path, rows: list, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    with pytest.raises(LoadError, match=message):
        read_records(path)


def test_text_csv_and_json_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first part\nof two lines\n\n\nsecond part\n")
    texts = read_records(tmp_path / "a.txt").records
    assert [(r.line, r.fields["text"]) for r in texts] == [
        (1, "first part\nof two lines"),
        (5, "second part"),
    ]
    (tmp_path / "b.csv").write_text('text,label\n"good, really",pos\nbad,neg\n')
    rows = read_records(tmp_path / "b.csv").records
    assert [(r.format, r.fields["text"], r.fields["label"]) for r in rows] == [
        ("label", "good, really", "pos"),
        ("label", "bad", "neg"),
    ]
    (tmp_path / "c.json").write_text('[{"sentence1": "a", "sentence2": "b"}]')
    assert read_records(tmp_path / "c.json").format == "pair"
    (tmp_path / "d.json").write_text('{"text": "a"}')
    with pytest.raises(LoadError, match="not a list of records"):
        read_records(tmp_path / "d.json")
    (tmp_path / "e.txt").write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(LoadError, match="not UTF-8, first invalid byte in line 2"):
        read_records(tmp_path / "e.txt")
    with pytest.raises(LoadError, match="cannot be read"):
        read_records(tmp_path / "missing.jsonl")


def test_records_from_python_objects() -> None:
    read = read_records(
        [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    )
    assert read.format == "messages"
    assert [m["role"] for m in read.records[0].fields["messages"]] == ["user", "assistant"]
    assert read_records(["a text", "another"]).format == "text"


# -- tokens -----------------------------------------------------------------------------


def learned(example: Example, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(example.labels[example.labels != IGNORE_INDEX].tolist(), special=True)


def test_only_assistant_turns_are_in_the_loss(tokenizer: Tokenizer) -> None:
    records = read_records([{"messages": CHAT}])
    (example,) = make_examples(records, tokenizer, max_length=200).examples
    assert learned(example, tokenizer) == (
        "the cat says meow<|im_end|>\nthe dog says woof<|im_end|>\n"
    )
    assert tokenizer.decode(example.ids.tolist(), special=True) == tokenizer.chat(CHAT)
    everything = make_examples(records, tokenizer, max_length=200, prompt=True).examples[0]
    assert (everything.labels == everything.ids).all()


def test_templates_that_rewrite_history(tmp_path: Path, tokenizers_installed: None) -> None:
    odd = "{{ messages | length }}!" + CHATML  # no rendering is the start of a longer one
    tokenizer = Tokenizer(write_tokenizer(tmp_path, template=odd))
    (example,) = make_examples(
        read_records([{"messages": CHAT}]), tokenizer, max_length=200
    ).examples
    assert learned(example, tokenizer) == "the cat says meowthe dog says woof"


def test_models_without_a_template_use_the_plain_one(
    tmp_path: Path, tokenizers_installed: None
) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, template=None))
    assert not tokenizer.has_template
    (example,) = make_examples(
        read_records([{"messages": CHAT[:2]}]), tokenizer, max_length=200
    ).examples
    assert learned(example, tokenizer) == " the cat says meow\n</s>"


def test_template_file_and_templates_that_raise(tmp_path: Path, tokenizers_installed: None) -> None:
    folder = write_tokenizer(tmp_path, template="unused")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    with pytest.raises(PrepareError, match="no system message"):
        Tokenizer(folder).chat(CHAT)
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(LoadError, match="chat template cannot be read"):
        Tokenizer(folder).chat(CHAT)
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(PrepareError, match="rejects the messages"):
        Tokenizer(folder).chat(CHAT)


def test_completions_follow_masked_prompts(tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "the cat says", "completion": "meow"}]
    (example,) = make_examples(read_records(rows), tokenizer, max_length=50).examples
    assert learned(example, tokenizer) == " meow</s>"
    assert tokenizer.decode(example.ids.tolist()) == "the cat says meow"


def test_long_texts_are_split_and_long_prompts_are_dropped(tokenizer: Tokenizer) -> None:
    text = "the cat sat on the mat " * 20
    parts = make_examples(read_records([text]), tokenizer, max_length=16)
    assert {len(e) for e in parts.examples[:-1]} == {16}
    whole = tokenizer.encode(text).ids
    assert sum(len(e) for e in parts.examples) in (len(whole), len(whole) + 1)
    rows = [{"prompt": text, "completion": "x"}, {"prompt": "the cat", "completion": text}]
    made = make_examples(read_records(rows), tokenizer, max_length=16)
    assert made.truncated == (1, 2)
    assert made.dropped == (1,)
    assert "1 dropped: no token to train on within max_length (line 1)" in made.note()
    with pytest.raises(PrepareError, match="no example has a token to train on"):
        make_examples(read_records(rows[:1]), tokenizer, max_length=16)


def test_a_tokenizer_of_another_model_raises(tokenizer: Tokenizer) -> None:
    made = make_examples(read_records(["the cat"]), tokenizer, max_length=16)
    check_vocabulary(made, tokenizer.size, tokenizer)
    with pytest.raises(PrepareError, match="tokenizer does not match the model: line 1 has token"):
        check_vocabulary(made, 4, tokenizer)


def test_token_id_arrays_and_invalid_labels() -> None:
    made = from_arrays([[1, 2, 3], [4, 5]], [[IGNORE_INDEX, 2, 3], [4, 9]])
    assert made.learned == 3
    with pytest.raises(LabelError, match="label 9 in row 1 is out of range"):
        check_vocabulary(made, 9)
    with pytest.raises(LabelError, match="token 5 in row 1"):
        check_vocabulary(from_arrays([[1, 2], [4, 5]], None), 5)
    with pytest.raises(ShapeError, match="different shapes in row 1"):
        from_arrays([[1], [2, 3]], [[1], [2]])


def test_missing_files_and_broken_tokenizers(tmp_path: Path, tokenizers_installed: None) -> None:
    with pytest.raises(LoadError, match="tokenizer not found"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match="not a tokenizer"):
        Tokenizer(tmp_path)


def test_preview_shows_tokens_in_the_loss(tokenizer: Tokenizer) -> None:
    records = read_records([{"prompt": "the cat says", "completion": "meow"}] * 5)
    text = preview(make_examples(records, tokenizer, max_length=50).examples, tokenizer)
    assert text.count("example ") == 3
    assert "read    | 'the cat says'" in text
    assert "learned | ' meow</s>'" in text


# -- batches ----------------------------------------------------------------------------


def example(*ids: int) -> Example:
    return Example(np.array(ids, np.int64), np.array(ids, np.int64), 1)


def test_collate_pads_rows_and_adds_model_inputs() -> None:
    names = ["input_ids", "attention_mask", "position_ids", "token_type_ids", "labels"]
    batch = collate([example(5, 6, 7), example(8, 9)], names, pad=3)
    assert list(batch) == names
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7], [8, 9, IGNORE_INDEX]]
    assert not batch["token_type_ids"].any()
    assert collate([example(5, 6)], ["input_ids"], multiple=8)["input_ids"].shape == (1, 8)
    with pytest.raises(ShapeError, match="unsupported inputs: pixel_values"):
        collate([example(1, 2)], ["input_ids", "pixel_values"])


def test_packing_keeps_all_tokens_and_restarts_positions() -> None:
    rng = np.random.default_rng(0)
    examples = [example(*rng.integers(5, 90, rng.integers(2, 20))) for _ in range(50)]
    rows = pack(examples, 32)
    assert max(len(r) for r in rows) <= 32
    assert len(rows) < 30
    assert sorted(np.concatenate([r.ids for r in rows])) == sorted(
        np.concatenate([e.ids for e in examples])
    )
    assert sum(r.learned for r in rows) == sum(e.learned for e in examples)
    for row in rows:
        assert row.positions is not None
        starts = row.positions == 0
        assert (row.labels[starts] == IGNORE_INDEX).all()
        assert (row.labels[~starts] == row.ids[~starts]).all()


def test_epoch_order_is_reproducible() -> None:
    rows = [example(i, i + 1) for i in range(10)]
    batches = TokenBatches(rows, ["input_ids", "labels"], batch_size=4, seed=7)
    epochs = [[b.arrays["input_ids"].tolist() for b in batches(e)] for e in (0, 1, 0)]
    assert [len(b) for b in epochs[0]] == [4, 4, 2]
    assert len(batches(0)) == 3
    assert epochs[0] == epochs[2] != epochs[1]
    first, second = (sorted(row for batch in epoch for row in batch) for epoch in epochs[:2])
    assert first == second
    in_order = TokenBatches(rows, ["input_ids"], batch_size=10, seed=None)
    assert next(iter(in_order(3))).arrays["input_ids"][:, 0].tolist() == list(range(10))
    assert next(iter(in_order(0))).size == 10  # each row has one token to learn
    with pytest.raises(ShapeError, match="batch_size"):
        TokenBatches(rows, ["input_ids"], batch_size=0)
