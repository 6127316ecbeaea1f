"""The live optimizer at its borders: arguments of other types, unusual models, closures and bases."""

from __future__ import annotations

import dataclasses

import pytest

from metasam.perturb import Adaptive, Fisher
from metasam.rules import (
    ESAM,
    RWP,
    WSAM,
    Agnostic,
    FriendlySAM,
    Lookbehind,
    LookSAM,
    MomentumSAM,
    RandomSAM,
    Sharp,
    SparseSAM,
    VaSSO,
    make,
)

from .cases import RULES

# what rules are made with

COUNTS = [
    (Sharp, "steps"), (Sharp, "m"), (Lookbehind, "steps"), (LookSAM, "every"), (ESAM, "noise_seed"),
    (RandomSAM, "noise_seed"), (RWP, "noise_seed"),
    *[(SparseSAM, name) for name in ("refresh", "samples", "horizon", "noise_seed")],
]  # fmt: skip
NUMBERS = [
    (Sharp, "rho"), (Sharp, "step_size"), (Adaptive, "eta"), (Fisher, "eta"), (Lookbehind, "keep"), (WSAM, "gamma"),
    (LookSAM, "reuse"), (FriendlySAM, "decay"), (VaSSO, "theta"), (ESAM, "keep"), (ESAM, "select"), (RWP, "mix"),
    (SparseSAM, "sparsity"), (SparseSAM, "drop"), (Agnostic, "val_momentum"), (Agnostic, "rho_val"),
    (MomentumSAM, "rho"),
]  # fmt: skip


@pytest.mark.parametrize("value", [1.5, 2.0, True, "2"])
@pytest.mark.parametrize(("kind", "name"), COUNTS, ids=str)
def test_counts_are_whole_numbers(kind, name, value):
    with pytest.raises(ValueError, match=f"expected {name} to be a whole number, got {name}={value!r}"):
        kind(**{name: value})


@pytest.mark.parametrize("value", ["abc", True, [0.1]])
@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=str)
def test_numbers_are_numbers(kind, name, value):
    with pytest.raises(ValueError, match=f"expected {name} to be a number, got {name}="):
        kind(**{name: value})


@pytest.mark.parametrize("value", [None, Adaptive, "asam"])
def test_a_geometry_is_one(value):
    tried = [c.rule for c in RULES if hasattr(c.rule, "perturb")]
    assert len({type(r) for r in tried}) == 12
    for rule in tried:
        with pytest.raises(ValueError, match=r"expected perturb to be a geometry, such as metasam\.perturb\.Steepest"):
            dataclasses.replace(rule, perturb=value)


def test_a_name_with_a_radius_of_text_is_refused_by_name():
    with pytest.raises(ValueError, match="expected rho to be a number, got rho='abc'"):
        make("sam", rho="abc")
