"""The rules: one short file a method, and the names by which commands and constructors know them.

>>> make("sam", rho=0.1)
Sharp(rho=0.1, perturb=Steepest(), steps=1, step_size=None, m=None, through=True)
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from ..perturb import Adaptive, Fisher, Unnormalised
from .agnostic import Agnostic as Agnostic
from .base import DirectionRule as DirectionRule
from .base import Rule as Rule
from .base import stackable as stackable
from .esam import ESAM as ESAM
from .friendly import FriendlySAM as FriendlySAM
from .gsam import GSAM as GSAM
from .lookbehind import Lookbehind as Lookbehind
from .looksam import LookSAM as LookSAM
from .msam import MomentumSAM as MomentumSAM
from .plain import Plain as Plain
from .random import RWP as RWP
from .random import RandomSAM as RandomSAM
from .sharp import Sharp as Sharp
from .sparse import SparseSAM as SparseSAM
from .vasso import VaSSO as VaSSO
from .wsam import WSAM as WSAM

NAMED: dict[str, Callable[..., Rule]] = {
    "plain": Plain,
    "sam": Sharp,
    "asam": partial(Sharp, rho=0.5, perturb=Adaptive()),
    "usam": partial(Sharp, perturb=Unnormalised()),
    "multistep": partial(Sharp, steps=2),
    "fisher": partial(Sharp, rho=0.1, perturb=Fisher()),
    "agnostic": Agnostic,
    "lookbehind": Lookbehind,
    "looksam": LookSAM,
    "gsam": GSAM,
    "friendly": FriendlySAM,
    "vasso": VaSSO,
    "momentum": MomentumSAM,
    "wsam": WSAM,
    "random": RandomSAM,
    "rwp": RWP,
    "esam": ESAM,
    "sparse": SparseSAM,
}
"""Every method by its short name, with its paper's defaults."""


def make(rule: str | Rule, *, rho: float | None = None, through: bool | None = None) -> Rule:
    """A rule from its name, with its own radius unless one is given; a Rule passes through unchanged.

    The radius of a rule that names two is ``rho_val``, and twice it ``rho_train``, as in Agnostic-SAM's paper.

    Raises:
        ValueError: an unknown name, or a radius for a rule that is an instance already (it has one) or knows none.
        TypeError: neither a name nor a rule.
    """
    if isinstance(rule, Rule):
        if rho is not None or through is not None:
            raise ValueError(
                f"expected a rule's name beside rho or through, got the instance {rule}: set them there, "
                "e.g. dataclasses.replace(rule, rho=...)"
            )
        return rule
    if not isinstance(rule, str):
        raise TypeError(f"expected a rule or its name ({', '.join(NAMED)}), got {rule!r}")
    if rule not in NAMED:
        near = difflib.get_close_matches(rule, NAMED, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"expected a rule among {', '.join(NAMED)}, got {rule!r}{hint}")
    made = NAMED[rule]()
    known = {f.name for f in dataclasses.fields(made)}  # type: ignore[arg-type]
    given: dict[str, Any] = {k: v for k, v in {"rho": rho, "through": through}.items() if v is not None}
    if "rho" in given and "rho_val" in known:
        given["rho_val"] = given.pop("rho")
        given["rho_train"] = 2 * given["rho_val"]
    if "rho" in given and "rho" not in known:
        raise ValueError(f"the rule {rule!r} has no radius: leave rho out, got rho={rho}")
    return dataclasses.replace(made, **{k: v for k, v in given.items() if k in known})  # type: ignore[type-var]
