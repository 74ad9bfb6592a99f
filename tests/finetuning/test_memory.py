"""The whole command takes the memory of its training: frozen weights are in memory once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxtrain
from onnxtrain.errors import LoadError
from onnxtrain.finetuning import FineTuneOptions, FineTuneRun
from onnxtrain.graph.io import external_data
from tests.text.models import genai_folder, llama
from tests.text.words import write_tokenizer

ROWS = {"input_ids": [[5, 6, 7, 8]] * 4}
WEIGHT = 96 << 20  # bytes of the frozen weight in the model of the memory test


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers", reason="the extra onnxtrain[text] is not installed")
    return genai_folder(write_tokenizer(tmp_path / "model"), llama(layers=1))


def externalize(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    onnx.save(
        model,
        folder / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=256,
    )


@pytest.mark.parametrize("external", [True, False])
def test_frozen_weights_are_in_no_protobuf_and_outputs_refer_to_files(
    folder: Path, tmp_path: Path, external: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_data, "MAPPED_MODEL_BYTES", 4096)
    monkeypatch.setattr("onnxtrain.adapters.ort_adapter.MAPPED_MODEL_BYTES", 4096)
    plain = FineTuneRun(folder, ROWS, FineTuneOptions(progress=False)).build()[1]
    if external:
        externalize(folder)
    adapted, artifacts = FineTuneRun(folder, ROWS, FineTuneOptions(progress=False)).build()
    assert adapted is not None
    frozen = set(adapted.plain.graph.initializers)
    for key, model in artifacts.models.items():
        inline = [t.name for t in model.graph.initializer if len(t.raw_data) >= 1024]
        assert not frozen.intersection(inline), key
    assert all(np.array_equal(a, artifacts.values[n]) for n, a in plain.values.items())
    options = {"progress": False, "sample_tokens": 2, "epochs": 1}
    result = onnxtrain.finetune(folder, ROWS, tmp_path / "out", **options)
    assert result.history.losses
    for name in ("merged", "base"):
        assert (tmp_path / "out" / name / "model.onnx.data").stat().st_size > 4096


def test_a_weight_file_that_changed_since_the_build_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_data, "MAPPED_MODEL_BYTES", 4096)
    externalize(folder)
    artifacts = FineTuneRun(folder, ROWS, FineTuneOptions(progress=False)).build()[1]
    data = folder / "model.onnx.data"
    content = data.read_bytes()
    data.unlink()
    data.write_bytes(bytes(len(content)))
    for use in (lambda: onnxtrain.Trainer(artifacts), lambda: artifacts.save(tmp_path / "art")):
        with pytest.raises(LoadError, match=r"model.onnx.data': this file was changed after"):
            use()


@pytest.mark.full
def test_the_command_holds_a_frozen_weight_less_than_three_times(
    folder: Path, tmp_path: Path
) -> None:
    """Five protobufs and their copies held it ten times; onnxruntime and the export need one."""
    if sys.platform != "linux":
        pytest.skip("the peak is read from /proc")
    model = ir.from_proto(onnx.load(folder / "model.onnx"))
    ids = next(x for x in model.graph.inputs if x.name == "input_ids")
    hidden = next(n for n in model.graph if n.op_type == "Gather" and n.inputs[1] is ids)
    table = hidden.inputs[0]
    assert table is not None
    assert table.const_value is not None
    rows, width = table.const_value.shape.numpy()
    big = np.zeros((WEIGHT // 4 // width, width), np.float32)
    big[:rows] = table.const_value.numpy()
    table.const_value = ir.Tensor(big, name=table.name)
    table.shape = table.const_value.shape
    onnx.save(ir.to_proto(model), folder / "model.onnx")
    del model, big
    externalize(folder)
    small = genai_folder(write_tokenizer(tmp_path / "small"), llama(layers=1))
    externalize(small)
    program = (
        "import json, sys, onnxtrain\n"
        "rows = {'input_ids': [[5, 6, 7, 8]] * 4}\n"
        "onnxtrain.finetune(sys.argv[1], rows, sys.argv[2], epochs=1, progress=False, threads=1)\n"
        "status = open('/proc/self/status').read().split('VmHWM:')[1]\n"
        "print(json.dumps(int(status.split()[0]) << 10))"
    )

    def peak(source: Path, name: str) -> int:
        command = [sys.executable, "-c", program, str(source), str(tmp_path / name)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        return json.loads(run.stdout.splitlines()[-1])

    assert peak(folder, "a") - peak(small, "b") < 3 * WEIGHT
