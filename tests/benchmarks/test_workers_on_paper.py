"""The model on paper of docs/distributed.md."""

from __future__ import annotations

import pytest

from benchmarks import distributed


def test_sizes_of_nets_are_those_of_their_publications() -> None:
    parameters, work = distributed.resnet50()
    assert parameters == 25_557_032
    assert work == pytest.approx(4.09e9, rel=1e-2)
    assert distributed.bert_base() == 109_482_240
    assert distributed.decoder(None) == 1_235_814_400


def test_the_page_has_the_table() -> None:
    page = distributed.PAGE.read_text()
    assert "\n".join(distributed.paper_table()) in page
    assert distributed.replaced(page, "paper", distributed.paper_table()) == page


def test_time_of_the_all_reduce_is_that_of_its_bytes() -> None:
    bytes_, flops = 400e9, 989e12 * 0.4  # one second of computation
    assert distributed.communication(8, 0.0, bytes_, flops) == pytest.approx(2 * 7 / 8 * 400 / 450)
    found = distributed.communication(16, 12.5e9, bytes_, flops)
    assert found == pytest.approx(2 * 15 / 16 * 32, rel=1e-4)
