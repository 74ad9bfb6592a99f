"""The page on methods shows the stored run."""

from __future__ import annotations

import json

from benchmarks import methods, page


def test_the_page_shows_the_stored_run() -> None:
    stored = json.loads(methods.RESULTS.read_text())
    assert list(stored) == list(methods.METHODS)
    begin, end = page.markers("methods")
    shown = methods.PAGE.read_text().partition(begin)[2].partition(end)[0].strip()
    assert shown == methods.table([r for rows in stored.values() for r in rows])
