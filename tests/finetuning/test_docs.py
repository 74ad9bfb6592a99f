"""The examples of docs/fine-tuning.md run as written."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.docs import run_page
from tests.docs.blocks import Block
from tests.docs.blocks import blocks as blocks_of
from tests.finetuning.test_encoders import LABELLED
from tests.finetuning.test_finetune import CHAT
from tests.text.models import Writer, encoder, genai_folder, llama
from tests.text.words import write_lines, write_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "fine-tuning.md"
SECTIONS = (
    "Language models",
    "Preferences",
    "Encoders: classes of texts",
    "Encoders: numbers for texts",
    "Encoders: tags of words",
    "Embeddings",
    "Vision",
)


def blocks(section: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def commands() -> list[Block]:
    """Return the blocks for the command line."""
    page = blocks_of("docs/fine-tuning.md")
    return [b for b in page if b.kind == "sh" and b.code.startswith("onnxtrain finetune ")]


def write_images(folder: Path, count: int = 8) -> Path:
    """Write red cats and blue dogs."""
    image = pytest.importorskip("PIL.Image", reason="the extra onnxtrain[images] is not installed")
    rng = np.random.default_rng(3)
    for name, channel in (("cat", 0), ("dog", 2)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 100, (10, 12, 3), np.uint8)
            pixels[..., channel] += 150
            image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


def vision() -> onnx.ModelProto:
    w = Writer(1)
    x = w.input("pixel_values", ir.DataType.FLOAT, ["batch", 3, 8, 8])
    for i, (before, after) in enumerate(((3, 4), (4, 8))):
        kernel = w.normal(f"conv{i}.weight", after, before, 3, 3)
        x = w.node("Conv", f"conv{i}", [x, kernel], kernel_shape=[3, 3], pads=[1] * 4)
        x = w.node("Relu", f"relu{i}", [x])
    x = w.node("Flatten", "flat", [w.node("GlobalAveragePool", "pool", [x])])
    y = w.node("Gemm", "head", [x, w.normal("head.weight", 8, 5), w.normal("head.bias", 5)])
    y.name, y.type, y.shape = "logits", ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", 5])
    w.graph.outputs.append(y)
    return ir.to_proto(ir.Model(w.graph, ir_version=10))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the files that the page names, in the working directory."""
    pytest.importorskip("tokenizers", reason="the extra onnxtrain[text] is not installed")
    genai_folder(write_tokenizer(tmp_path / "llama-int4"), llama(layers=1))
    onnx.save(encoder(), write_tokenizer(tmp_path / "encoder") / "model.onnx")
    onnx.save(vision(), tmp_path / "vision.onnx")
    write_images(tmp_path / "images")
    write_lines(tmp_path / "chat.jsonl", *CHAT)
    answers = {"prompt": "what does the cat say?", "chosen": "meow", "rejected": "woof"}
    write_lines(tmp_path / "answers.jsonl", *[answers] * 4)
    rows = [f"{row['text']},{row['label']}" for row in LABELLED]
    (tmp_path / "labels.csv").write_text("\n".join(["text,label", *rows]))
    pairs = [{"anchor": f"the {a}", "positive": f"a {a} says"} for a in ("cat", "dog", "mouse")]
    write_lines(tmp_path / "pairs.jsonl", *pairs)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("section", SECTIONS)
def test_examples_run_as_written(
    section: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = blocks(section)
    assert code
    for block in code:
        exec(compile(block, str(PAGE), "exec"), {})
    written = {
        "Language models": ["out/merged/model.onnx", "out/peft/adapter_model.safetensors"],
        "Preferences": ["preferred-2/merged/model.onnx"],
        "Encoders: classes of texts": ["classifier/merged/model.onnx", "classifier/labels.json"],
        "Encoders: numbers for texts": ["scorer/merged/model.onnx"],
        "Encoders: tags of words": ["tagger/merged/model.onnx", "tagger/labels.json"],
        "Embeddings": ["embedder/merged/model.onnx"],
        "Vision": [
            *("vision-trained.onnx", "vision-adapter/adapter_model.safetensors"),
            *("vision-out/merged/vision.onnx", "vision-out/labels.json"),
            "vision-out/peft/adapter_model.safetensors",
        ],
    }[section]
    assert [name for name in written if not (files / name).is_file()] == []
    if section == "Language models":
        before, after = capsys.readouterr().out.split(" -> ")[:2]
        assert float(after.split()[0]) < float(before.split()[-1])


@pytest.mark.parametrize(("number", "folder"), [(0, "out"), (1, "preferred"), (2, "classifier")])
def test_commands_run_as_written(
    number: int, folder: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(commands()) == 3
    source = str(Path(__file__).parents[2] / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))
    run_page.run(commands()[number], {}, files)
    assert list((files / folder / "merged").glob("*.onnx"))


def test_named_data_forms_are_read() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"## {s}\n" in text for s in SECTIONS)
    assert np.all([f'"{name}"' in text for name in ("messages", "prompt", "completion", "text")])
