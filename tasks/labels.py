"""Which labelled examples to take, and how to spoil their labels: exact counts, decided by a key alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from metasam.tasks.counter import bits, fold, uniform

NOISE_KINDS = ("symmetric", "asymmetric")

CIFAR10_CONFUSIONS = {9: 1, 2: 0, 4: 7, 3: 5, 5: 3}
"""truck -> automobile, bird -> airplane, deer -> horse, cat <-> dog (Patrini et al., CVPR 2017)."""


def permutation(key: Tensor, count: int) -> Tensor:
    """Return ``range(count)`` in the random order of a key ``[]``.

    >>> permutation(torch.tensor(7), 5).sort().values
    tensor([0, 1, 2, 3, 4])
    """
    return bits(key, count).argsort()


def apportion(sizes: Tensor, total: int) -> Tensor:
    """Return how many of each class to take, ``total`` in all, in proportion to their sizes.

    The largest remainders get one more, the lower class where they tie.

    >>> apportion(torch.tensor([10, 20, 5]), 8)
    tensor([2, 5, 1])
    """
    quota = sizes.double() * total / max(int(sizes.sum()), 1)
    counts = (quota + 1e-9).floor().long()
    left = total - int(counts.sum())
    counts[(quota - counts).argsort(descending=True, stable=True)[:left]] += 1
    return counts


def take(labels: Tensor, counts: Tensor, key: Tensor) -> Tensor:
    """Return a mask ``[N]`` of ``counts[c]`` random examples of each class c.

    With the same key a smaller count takes a part of what a larger one takes.
    """
    order = permutation(key, len(labels))
    order = order[labels[order].argsort(stable=True)]  # by class, in random order inside it
    sizes = labels.bincount(minlength=len(counts))
    rank = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes)[labels[order]]
    mask = torch.zeros(len(labels), dtype=torch.bool)
    mask[order] = rank < counts[labels[order]]
    return mask


def share(labels: Tensor, total: int, key: Tensor) -> Tensor:
    """Return a mask ``[N]`` of ``total`` random examples, each class in proportion."""
    return take(labels, apportion(labels.bincount(), total), key)


def check_noise(noise: Any, kind: Any) -> float:
    """Return ``noise`` as a float.

    Raises:
        ValueError: it is not a number between 0 and 1, or ``kind`` is not one of `NOISE_KINDS`.
    """
    if kind not in NOISE_KINDS:
        raise ValueError(f"expected noise_kind to be one of {', '.join(NOISE_KINDS)}, got noise_kind={kind!r}")
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise <= 1:
        raise ValueError(f"expected noise to be a number between 0 (none) and 1, got noise={noise!r}")
    return float(noise)


def spoil(
    labels: Tensor,
    classes: int,
    noise: float,
    key: Tensor,
    kind: str = "symmetric",
    confusions: Mapping[int, int] | None = None,
) -> Tensor:
    """Return labels ``[N]`` with a share of them wrong: exactly ``round(noise * n)``, each class in proportion.

    Args:
        labels: int64 ``[N]`` below ``classes``.
        classes: number of classes.
        noise: the share of wrong labels, of the n examples that can get one.
        key: which ones, and what they become.
        kind: "symmetric": every example can get a wrong label, any other class with equal chance. "asymmetric": class c
            becomes ``confusions[c]``, and classes that are not in it keep their labels.
        confusions: of "asymmetric"; None: c becomes c + 1, the last class the first.

    Raises:
        ValueError: noise or kind is out of range, there is only one class, or no class can be confused.

    >>> spoil(torch.tensor([0, 1, 2, 0, 1, 2]), 3, 1.0, torch.tensor(0), "asymmetric")
    tensor([1, 2, 0, 1, 2, 0])
    """
    noise = check_noise(noise, kind)
    if not noise:
        return labels
    if classes < 2:
        raise ValueError(f"expected at least 2 classes for wrong labels, got {classes}: set noise=0")
    if kind == "symmetric":
        source = torch.ones(classes, dtype=torch.bool)
        offset = 1 + (uniform(fold(key, 1), len(labels)) * (classes - 1)).long()
        wrong = (labels + offset) % classes
    else:
        pairs = {c: (c + 1) % classes for c in range(classes)} if confusions is None else confusions
        pairs = {c: t for c, t in pairs.items() if c < classes and t < classes}
        if not pairs:
            raise ValueError("expected classes to confuse, got none of them: set noise_kind=symmetric")
        source = torch.zeros(classes, dtype=torch.bool)
        target = torch.arange(classes)
        for c, t in pairs.items():
            source[c], target[c] = True, t
        wrong = target[labels]
    sizes = labels.bincount(minlength=classes) * source
    counts = apportion(sizes, round(noise * int(sizes.sum())))
    return torch.where(take(labels, counts, fold(key, 0)), wrong, labels)


def count_of(name: str, value: Any, examples: int, what: str = "examples", of: int | None = None) -> int:
    """Return a number of examples, given as one or as a share below 1 of ``of`` (None: of all the examples).

    Raises:
        ValueError: it is neither, or it takes none or all of the examples.
    """
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if name == "validation" and fits is False and value == 0:
        raise ValueError(
            "expected validation examples, as the best weights are chosen by them, got validation=0: set "
            "validation=0.1, and take accuracy_last of the results for the last weights"
        )
    if not fits or (value >= 1 and value != int(value)):
        raise ValueError(f"expected {name} to be a number of examples or a share of them below 1, got {name}={value!r}")
    count = int(value) if value >= 1 else round(value * (examples if of is None else of))
    if count > examples and value < 1:
        raise ValueError(
            f"{name}={value} of all {of} examples is {count}, and {examples} are left; expected 1 to {examples - 1}: "
            f"set {name} accordingly"
        )
    if not 0 < count < examples:
        raise ValueError(
            f"{name}={value} takes {count} of {examples} {what}; expected 1 to {examples - 1}: set {name} accordingly"
        )
    return count
