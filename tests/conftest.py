from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers, whichever ran before it; tiny operations gain nothing from threads."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
