"""The worker processes of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Three processes; a test uses two or all of them."""
    pool = Pool(3)
    yield pool
    pool.close()
