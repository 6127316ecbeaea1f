"""Engines: the ways to run the inner loop on a batch of tasks."""

from __future__ import annotations

from . import higher, vmap
from .backward import Job as Job
from .backward import backward as backward
from .choose import check_labels as check_labels
from .choose import choose as choose
from .choose import classes as classes
from .choose import use_kernels as use_kernels
from .choose import workers as workers
from .ends import Beside as Beside
from .held import held as held
from .held import numbers as numbers
from .held import without_tensors as without_tensors
from .loop import Adapted as Adapted
from .loop import Engine as Engine
from .loop import InnerLoop as InnerLoop
from .loop import differentiable as differentiable
from .traced import Graphs as Graphs

ENGINES: dict[str, Engine] = {"higher": higher.run, "vmap": vmap.run}

TRACED = ("traced", "compiled")
"""Engines that are vmap but for gradients, see `metasam.inner.traced`."""
