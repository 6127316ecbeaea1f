"""Engines: the ways to run the inner loop on a batch of tasks."""

from __future__ import annotations

from . import higher, vmap
from .choose import check_labels as check_labels
from .choose import choose as choose
from .choose import classes as classes
from .loop import Adapted as Adapted
from .loop import Engine as Engine
from .loop import InnerLoop as InnerLoop
from .loop import differentiable as differentiable

ENGINES: dict[str, Engine] = {"higher": higher.run, "vmap": vmap.run}
