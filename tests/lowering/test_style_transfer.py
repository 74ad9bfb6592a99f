"""The style-transfer example: training, old weight files, and images in real runtimes."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "style_transfer"
MODULES = (
    *("net", "images", "features", "stylist", "loss", "train", "runtimes", "run"),
    "decompositions",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def example():
    """The example's modules, which have short names, out of the way afterwards."""
    before = {name: sys.modules.pop(name, None) for name in MODULES}
    sys.path.insert(0, str(FOLDER))
    try:
        modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in MODULES}
        yield SimpleNamespace(**modules)
    finally:
        sys.path.remove(str(FOLDER))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@pytest.fixture(scope="module")
def tiny(example):
    """Settings of a moment's training."""
    return example.train.Settings(
        image_size=32, style_size=40, batch_size=2, steps=2, epochs=1, lr=1e-3
    )


@pytest.fixture(scope="module")
def forms(example, tiny):
    """A net, and its models for 32 x 32 pixels."""
    net = example.train.initial_net(tiny).eval()
    return net, example.run.forms(net, 32)


def needs(engine: str) -> None:
    """Skip where the runtime is not installed; `make test` installs all of them."""
    if not shutil.which("node"):
        pytest.skip("needs node")
    if "onnxjs" in engine and not (_modules() / "onnxjs").is_dir():
        pytest.skip("needs onnxjs: make onnxjs")
    if "Chromium" in engine:
        if not os.environ.get("CHROMIUM") and not any(map(shutil.which, BROWSERS)):
            pytest.skip("needs chromium")
        if not (FOLDER.parents[1] / "web/node_modules/onnxruntime-web").is_dir():
            pytest.skip("needs onnxruntime-web: npm ci in web/")


def _modules() -> Path:
    return Path(os.environ.get("ONNXJS_MODULES", Path(__file__).parent / "onnxjs" / "node_modules"))


def test_loss_and_steps_are_torchs(example, tiny):
    stylist = example.train.create_stylist(tiny, example.train.initial_net(tiny))
    ours = example.loss.StyleLoss(stylist.net, 1.0, 1.0)
    trainer = example.train.create_trainer(ours, tiny)
    assert set(trainer.parameters) == {f"net.{n}" for n, _ in ours.net.named_parameters()}
    last = list(ours.net.deconv3.parameters())
    others = [p for n, p in ours.net.named_parameters() if not n.startswith("deconv3.")]
    groups = [
        {"params": others, "lr": tiny.lr},
        {"params": last, "lr": tiny.lr * example.train.GAIN},
    ]
    descent = torch.optim.Adam(groups)
    (batch, *_) = example.train.batches(tiny)
    losses = []
    for step in range(4):
        descent.zero_grad()
        loss, *parts = ours(*map(torch.from_numpy, batch))
        loss.backward()
        descent.step()
        outcome = trainer.step(*batch)
        # Where a gradient is about 0, Adam's first steps follow its rounding.
        assert outcome.loss == pytest.approx(loss.item(), rel=1e-5 if step == 0 else 2e-2)
        if step == 0:
            for name, part in zip(example.train.PARTS, parts, strict=True):
                assert outcome.metrics[name] == pytest.approx(part.item(), rel=1e-5), name
        losses.append(outcome.loss)
    assert losses[-1] < 0.97 * losses[0]


def test_distance_of_patches_knows_a_style(example):
    """Other pieces of the style are nearer than photos, noise, or its own colours in disorder."""
    rng = np.random.default_rng(0)
    images, loss = example.images, example.loss
    drawn = [torch.from_numpy(w) for w in loss.filters(rng)]
    style = images.load("mosaic", 200)
    wanted, alike = (torch.from_numpy(images.crops([style], 64, 4, rng)) / 255 for _ in range(2))
    photos = torch.from_numpy(images.crops([images.load("china", 128)], 64, 4, rng)) / 255
    order = torch.from_numpy(rng.permutation(64 * 64))
    disorder = alike.flatten(2)[..., order].reshape(alike.shape)
    near = loss.patch_distance(alike, wanted, drawn)
    for other in (photos, torch.rand_like(wanted), disorder):
        assert loss.patch_distance(other, wanted, drawn) > 3 * near
    assert loss.patch_distance(wanted, wanted, drawn) == 0


def test_distance_everywhere_sees_an_even_quarter(example):
    """One quarter without tiles counts, though three more lively ones may hide it in the whole."""
    rng = np.random.default_rng(0)
    images, loss = example.images, example.loss
    edges = torch.from_numpy(loss.filters(rng)[1])
    style = images.load("mosaic", 200)
    wanted, alike = (torch.from_numpy(images.crops([style], 64, 4, rng)) / 255 for _ in range(2))
    parts = loss.quarters(alike)
    assert parts.shape == (16, 3, 32, 32)
    assert torch.equal(parts[0], alike[0, :, :32, :32])
    assert torch.equal(parts[-1], alike[-1, :, 32:, 32:])
    holed = alike.clone()
    holed[:, :, :32, :32] = holed[:, :, :32, :32].mean((2, 3), keepdim=True)
    assert loss.quarter_distance(holed, wanted, edges) > 1.5 * loss.quarter_distance(
        alike, wanted, edges
    )


def test_layout_has_lines_of_dark_tiles_too(example):
    """Lines between dark tiles are about as dark in it as those between light ones."""
    style = np.full((60, 120, 3), 200.0, np.float32)
    style[:, 60:] = 50.0
    style[:, [30, 31, 90, 91]] = 8.0
    layout = example.stylist.layout_of(style)[0]
    tiles = [layout[30, 20], layout[30, 100]]
    light, dark = tiles[0] - layout[30, 30], tiles[1] - layout[30, 90]
    assert light > 0.6 * example.stylist.LINE_DEPTH
    assert dark > 0.6 * light
    assert layout.mean() == pytest.approx(0, abs=1e-3)


def test_layout_of_a_mosaic_is_repeated_and_of_a_photo_mirrored(example):
    for name, mirrored in (("mosaic", False), ("china", True), ("flower", True)):
        style = example.images.load(name, 200)
        net = example.net.TransformerNet(8)
        assert example.stylist.Stylist(net, style).mirrored is mirrored, name


def test_stylist_at_any_size_in_onnxruntime(example, tiny, tmp_path):
    """The exported whole, layout and all, is torch's, for images larger than the layout."""
    stylist = example.train.create_stylist(tiny, example.train.initial_net(tiny)).eval()
    example.train.write(stylist, tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "style.onnx")
    for height, width in ((32, 100), (172, 44)):
        image = np.random.default_rng(0).uniform(0, 255, (1, 3, height, width)).astype(np.float32)
        with torch.no_grad():
            expected = stylist(torch.from_numpy(image)).numpy()
        (styled,) = session.run(None, {"image": image})
        np.testing.assert_allclose(styled, expected, atol=example.run.LIMIT)
    even = torch.full((1, 3, 64, 64), 128.0)
    nothing = torch.zeros(1, 1, 64, 64)
    assert torch.allclose(stylist.preprocess(even, nothing), even, atol=1e-2)


@pytest.mark.parametrize("channels", [8, 16, 32])
def test_weight_files_of_pytorchs_example(example, tmp_path, channels: int):
    torch.manual_seed(channels)
    net = example.net.TransformerNet(channels).eval()
    state = dict(net.state_dict())
    norms = [n for n, m in net.named_modules() if isinstance(m, nn.InstanceNorm2d)]
    assert len(norms) == 15
    for name in norms:  # as old versions of torch wrote them
        count = state[f"{name}.weight"].shape[0]
        state |= {
            f"{name}.running_mean": torch.ones(count),
            f"{name}.running_var": torch.ones(count),
        }
    torch.save(state, tmp_path / "old.model")
    image = torch.rand(1, 3, 16, 24) * 255
    with torch.no_grad():
        assert torch.equal(example.net.load_net(tmp_path / "old.model")(image), net(image))
    del state["res1.conv1.conv2d.weight"]
    with pytest.raises(RuntimeError, match=r"res1\.conv1\.conv2d\.weight"):
        example.net.from_state(state)
    with pytest.raises(ValueError, match="not a state dict of TransformerNet"):
        example.net.from_state({"features.0.weight": torch.zeros(1)})


def test_vgg16_weights(example, tmp_path):
    wanted = example.features.FeatureNet()
    assert wanted.taps == [3, 8, 15, 22]
    state = {f"features.{n}": v for n, v in wanted.features.state_dict().items()}
    torch.save({**state, "classifier.0.bias": torch.zeros(3)}, tmp_path / "vgg16.pth")
    loaded = example.features.load_vgg16(tmp_path / "vgg16.pth")
    image = torch.rand(1, 3, 16, 16) * 255
    for a, b in zip(loaded(image), wanted(image), strict=True):
        assert torch.equal(a, b)
    assert not any(p.requires_grad for p in loaded.parameters())


def test_features_count_where_there_are_some(example, tiny):
    torch.manual_seed(0)
    features = example.features.frozen(example.features.FeatureNet((4, "M", 8)))
    stylist = example.train.create_stylist(tiny, example.train.initial_net(tiny))
    batch = [torch.from_numpy(a) for a in example.train.batches(tiny)[0]]
    plain = example.loss.StyleLoss(stylist.net, 1.0, 1.0)(*batch)
    more = example.loss.StyleLoss(stylist.net, 1.0, 1.0, features)(*batch)
    assert more[2] > plain[2]
    added = (more[2] - plain[2]).item()
    assert (more[0] - plain[0]).item() == pytest.approx(added, rel=1e-3)


def test_lowering_leaves_fewer_kinds_of_operators(forms):
    rows = {row.form: row.cells[3:7] for row in forms[1]}
    nodes = {form: int(cells[0]) for form, cells in rows.items()}
    kinds = {form: tuple(map(int, cells[1:])) for form, cells in rows.items()}
    assert list(kinds.values()) == [(15, 2, 16), (15, 2, 16), (15, 2, 0), (0, 0, 0)]
    assert nodes["opset 7"] == 64 < nodes["opset 7, no Pad"] < nodes["opset 7, base operators"]


@pytest.mark.parametrize(
    "engine", ["onnxjs, Node", "onnxruntime-web, Chromium", "onnxjs WebGL, Chromium"]
)
def test_pictures_of_real_runtimes_are_torchs(example, forms, engine: str):
    needs(engine)
    net, rows = forms
    image = example.images.planes(example.images.load("china", 32)[:, :32])[None]
    if "WebGL" in engine:  # a GPU in software takes its time
        rows = rows[1:2]
    styled = example.run.compare(rows, engine, image, net)  # raises above 1e-2
    assert styled.shape == image.shape
    assert styled.std() > 1
    refused = [row.form for row in rows if row.results[engine] == "refused"]
    assert refused == (["exported, opset 20"] if engine == "onnxjs, Node" else [])


def test_page_styles_an_uploaded_picture(example, forms, tmp_path):
    needs("Chromium")
    net, rows = forms
    onnx.save(rows[0].model, tmp_path / "style.onnx")
    (tmp_path / "styles.json").write_text(json.dumps([{"name": "mine", "file": "style.onnx"}]))
    example.images.save(
        tmp_path / "given.png", example.images.planes(example.images.load("flower", 96))
    )
    arguments = [tmp_path, tmp_path / "given.png", "128", tmp_path / "pixels"]
    done = subprocess.run(
        ["node", FOLDER / "runners" / "page.mjs", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=1200,
    )
    said = json.loads(done.stdout)
    assert said["errors"] == []
    assert said["status"].startswith("128 x 84 in ")
    before, after = (
        np.moveaxis(
            np.fromfile(tmp_path / f"pixels.{n}", np.uint8).reshape(84, 128, 4)[..., :3], -1, 0
        )
        for n in ("before", "after")
    )
    with torch.no_grad():
        expected = net(torch.from_numpy(before[None].astype(np.float32))).numpy()[0]
    assert np.abs(expected.clip(0, 255) - after).max() < 0.5 + example.run.LIMIT


def test_command_line(example, tmp_path, capsys):
    small = "--steps 1 --epochs 1 --image-size 32 --style-size 40 --batch-size 1"
    options = "--style-image flower --content-weight 2 --style-weight 3 --num-channels 8"
    example.train.main([*small.split(), *options.split(), "--out", str(tmp_path)])
    assert "style.onnx" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(tmp_path / "style.onnx")
    (styled,) = session.run(None, {"image": np.zeros((2, 3, 20, 36), np.float32)})
    assert styled.shape == (2, 3, 20, 36)
    assert torch.load(tmp_path / "style.pth")["conv1.conv2d.weight"].shape == (8, 3, 9, 9)
    assert {o.version for o in onnx.load(tmp_path / "style.onnx").opset_import if not o.domain} == {
        20
    }


def test_every_way_to_write_an_operator_is_right(example):
    ways = example.decompositions
    x = np.random.default_rng(0).normal(0, 1, (1, ways.C, ways.H, ways.H)).astype(np.float32)
    groups = (ways.NORMS, ways.ENLARGEMENTS, ways.REFLECTIONS)
    for texts, wanted in zip(groups, ways.expected(x), strict=True):
        for name, text in texts.items():
            session = onnxruntime.InferenceSession(ways.model(text).SerializeToString())
            (actual,) = session.run(None, {"x": x})
            np.testing.assert_allclose(actual, wanted, atol=1e-4, err_msg=name)
