"""Data sets for ordinary supervised training: `digits` (embedded), `cifar`, `image_folder`, `npz`.

    >>> data = digits(per_class=10, noise=0.2, batch_size=32)
    >>> data.size("train"), data.size("validation"), data.size("test"), data.input_shape
    (100, 200, 797, (1, 8, 8))
    >>> data.batch(0).support[0].shape
    torch.Size([32, 1, 8, 8])

Each makes a `Supervised`, and takes these options:

- ``classes``: only the first so many classes.
- ``per_class``: only so many training examples of each class; ``fraction``: only that share of the training set, each
  class in proportion. Chosen by ``seed``, a smaller set inside a larger one.
- ``noise``: share of training labels that are made wrong, an exact number of them, chosen by ``seed``; see
  `metasam.tasks.labels.spoil` for the kinds. It comes after the choice above. Only training labels are touched, those
  of a held-out part included, as nobody who has noisy labels can tell; validation and test labels stay right.
- ``batch_size``, ``seed``, ``holdout``, ``val_fraction``, ``augment``: see `Supervised`.
- ``split_seed``: of dividing the data into training, validation and test examples where they are not published
  divided. It does not depend on ``seed``, so that all seeds are tested on the same examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metasam.tasks.cache import need
from metasam.tasks.counter import task_keys
from metasam.tasks.family import SPLITS, check_count
from metasam.tasks.labels import check_noise, count_of, share, spoil, take
from metasam.tasks.streams import Examples, Supervised

__all__ = ["Supervised", "digits"]

# streams of a seed that nothing else uses
_SPLIT, _LIMIT, _NOISE = range(0x64617400, 0x64617403)


def digits(
    *,
    validation: float = 200,
    test: float = 797,
    split_seed: int = 0,
    classes: int | None = None,
    per_class: int | None = None,
    fraction: float | None = None,
    noise: float = 0.0,
    noise_kind: str = "symmetric",
    batch_size: int = 64,
    seed: int = 0,
    holdout: float = 0.0,
    val_fraction: float = 0.25,
    augment: str | None = None,
) -> Supervised:
    """Return 1,797 handwritten digits of 8 x 8 pixels in [0, 1] (Alpaydin & Kaynak 1998), which scikit-learn embeds.

    ``validation`` and ``test`` are numbers of examples, or shares of all below 1, each class in proportion; the rest,
    800, is trained on. The other options are those of the module.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: an option is out of range.
    """
    published = need("sklearn.datasets").load_digits()
    images = torch.as_tensor(published.images).float().div_(16).unsqueeze(1)
    data = _divided((images, torch.as_tensor(published.target).long()), validation, test, split_seed)
    return _supervised(
        "digits",
        data,
        _Options(classes, per_class, fraction, noise, noise_kind),
        {"source": "scikit-learn load_digits", "split_seed": split_seed},
        batch_size=batch_size, seed=seed, holdout=holdout, val_fraction=val_fraction, augment=augment,
    )  # fmt: skip


class _Options(NamedTuple):
    """What is done to the training set."""

    classes: int | None
    per_class: int | None
    fraction: float | None
    noise: float
    noise_kind: str


def _divided(data: Examples, validation: float | None, test: float | None, split_seed: int) -> dict[str, Examples]:
    """Divide examples into splits, each class in proportion; None: that split comes from elsewhere."""
    x, y = data
    seed = check_count("split_seed", split_seed, least=0)
    rest = torch.arange(len(y))
    parts = {}
    for name, asked in (("test", test), ("validation", validation)):
        if asked is None:
            continue
        # a share is of all the examples, whichever split is taken first
        count = count_of(name, asked if asked >= 1 else max(1, round(asked * len(y))), len(rest))
        chosen = share(y[rest], count, task_keys(seed, _SPLIT, [SPLITS.index(name)])[0])
        parts[name], rest = rest[chosen], rest[~chosen]
    return {name: (x[index], y[index]) for name, index in {"train": rest, **parts}.items()}


def _supervised(
    name: str,
    data: Mapping[str, Examples],
    options: _Options,
    facts: Mapping[str, Any],
    *,
    names: list[str] | None = None,
    confusions: Mapping[int, int] | None = None,
    standardize: bool = False,
    **stream: Any,
) -> Supervised:
    """Apply the options that all sources share."""
    count, per_class, fraction, noise, kind = options
    seed = check_count("seed", stream["seed"], least=0)
    noise = check_noise(noise, kind)
    there = len(names) if names is not None else 1 + max(int(y.max()) for _, y in data.values())
    classes = there if count is None else check_count("classes", count, least=2)
    if classes > there:
        raise ValueError(f"expected classes to be at most {there}, which {name} has, got classes={classes}")
    if classes < there:
        data = {split: (x[y < classes], y[y < classes]) for split, (x, y) in data.items()}
    x, y = data["train"]
    if per_class is not None and fraction is not None:
        raise ValueError(f"expected per_class or fraction, got per_class={per_class} and fraction={fraction}: drop one")
    key = task_keys(seed, _LIMIT, [0])[0]
    if per_class is not None:
        need_each = check_count("per_class", per_class)
        sizes = y.bincount(minlength=classes)
        short = (sizes < need_each).nonzero().flatten().tolist()
        if short:
            c = short[0]
            raise ValueError(
                f"class {names[c] if names else c!r} of {name} has {int(sizes[c])} training examples, per_class="
                f"{need_each} needs {need_each}: set per_class={int(sizes.min())} or less"
            )
        chosen = take(y, torch.full((classes,), need_each), key)
        x, y = x[chosen], y[chosen]
    elif fraction is not None:
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ValueError(f"expected fraction to be above 0 and at most 1, got fraction={fraction!r}")
        total = round(fraction * len(y))
        if not total:
            raise ValueError(f"fraction={fraction} of {len(y)} training examples is none: set a larger fraction")
        chosen = share(y, total, key)
        x, y = x[chosen], y[chosen]
    clean = y
    y = spoil(y, classes, noise, task_keys(seed, _NOISE, [0])[0], kind, confusions)
    if standardize:
        stream["mean"], stream["std"] = moments(x)
    facts = {
        **facts,
        "per_class": per_class,
        "fraction": fraction,
        "noise": noise,
        "noise_kind": kind if noise else None,
        "wrong_labels": int((y != clean).sum()),
    }
    return Supervised(
        (x, y), data["validation"], data["test"], classes=classes, name=name, description=facts, **stream
    )  # fmt: skip


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel (of each feature of ``[N, F]``), uint8 as numbers in [0, 1].

    A constant one gets 1, so that dividing by it is harmless.

    >>> mean, std = moments(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    >>> mean, std
    (tensor([2., 5.], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
    """
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    axes = [0, *range(2, x.ndim)]
    # in pieces, so that large images are never in memory as float64 as a whole
    size = x.numel() // x.shape[1]
    mean = sum(part.double().sum(axes) for part in x.split(1024)) / (size * unit)
    shape = (-1, *[1] * (x.ndim - 2))
    mean = mean.view(shape)
    square = sum((part.double() / unit - mean).square().sum(axes) for part in x.split(1024))
    std = (square / size).sqrt().view(shape)
    return mean, torch.where(std > 1e-8, std, 1.0)
