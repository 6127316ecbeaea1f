"""Every generator that a run may draw from, seeded and saved together."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed torch, and what a network or a task family of the user's own may draw from: ``random`` and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def state() -> dict[str, Any]:
    """Where all of them are, as plain values and tensors."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": [version, list(words), gauss],
    }
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = [kind, keys.tolist(), *rest]
    return found


def restore(saved: dict[str, Any]) -> None:
    """Set all of them to what `state` gave."""
    torch.set_rng_state(saved["torch"].cpu())
    if saved["cuda"]:
        torch.cuda.set_rng_state_all([s.cpu() for s in saved["cuda"]])
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in sys.modules and "numpy" in saved:
        sys.modules["numpy"].random.set_state(tuple(saved["numpy"]))
