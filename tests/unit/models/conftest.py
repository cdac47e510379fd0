"""Tests of models run on one thread, and without transformers' progress bars."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from petals_async.models.loading import quiet_transformers


@pytest.fixture(autouse=True)
def one_quiet_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with quiet_transformers():
        yield
    torch.set_num_threads(threads)
