"""Data sets for ordinary supervised training: `digits` (embedded), `cifar`, `image_folder`, `npz`.

    >>> data = digits(per_class=10, noise=0.2, batch_size=32)
    >>> data.size("train"), data.size("validation"), data.size("test"), data.input_shape
    (100, 200, 797, (1, 8, 8))
    >>> data.batch(0).support[0].shape
    torch.Size([32, 1, 8, 8])

Each makes a `Supervised`, and takes these options:

- ``classes``: only the first so many classes.
- ``per_class``: only so many training examples of each class, a smaller number out of a larger one. ``fraction``: only
  that share of the training set, each class in proportion. Both are chosen by ``seed``.
- ``noise``: share of training labels that are made wrong, an exact number of them, chosen by ``seed``; see
  `metasam.tasks.labels.spoil` for the kinds. It comes after the choice above. Only training labels are touched, those
  of a held-out part included, as nobody who has noisy labels can tell; validation and test labels stay right.
- ``batch_size``, ``seed``, ``holdout``, ``val_fraction``, ``augment``: see `Supervised`.
- ``split_seed``: of dividing the data into training, validation and test examples where they are not published
  divided. It does not depend on ``seed``, so that all seeds are tested on the same examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metasam.tasks.cache import need
from metasam.tasks.counter import task_keys
from metasam.tasks.family import SPLITS, check_count
from metasam.tasks.files import folder_files, read_folder, read_npz
from metasam.tasks.labels import CIFAR10_CONFUSIONS, check_noise, count_of, share, spoil, take
from metasam.tasks.streams import Examples, Supervised

__all__ = ["Supervised", "cifar", "digits", "image_folder", "npz"]

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


def cifar(
    root: str | Path,
    *,
    name: str = "cifar10",
    download: bool = False,
    validation: float = 5000,
    split_seed: int = 0,
    classes: int | None = None,
    per_class: int | None = None,
    fraction: float | None = None,
    noise: float = 0.0,
    noise_kind: str = "symmetric",
    batch_size: int = 128,
    seed: int = 0,
    holdout: float = 0.0,
    val_fraction: float = 0.25,
    augment: str | None = None,
) -> Supervised:
    """Return CIFAR-10 or CIFAR-100 (Krizhevsky 2009): 50,000 training and 10,000 test images of 32 x 32 pixels.

    ``root`` is the folder with ``cifar-10-batches-py`` or ``cifar-100-python``, read and checked by torchvision;
    ``download`` fetches what is missing. ``validation`` training images, or their share below 1, are taken for
    validation, each class in proportion. Asymmetric noise confuses the pairs that are usual for CIFAR-10 (truck to
    automobile, bird to airplane, deer to horse, cat and dog), and each class of CIFAR-100 with the next. Channels are
    standardised by their published mean and standard deviation. The other options are those of the module.

    Raises:
        ImportError: torchvision is not installed.
        FileNotFoundError: the folder is not there.
        OSError: its files are not the published ones.
        ValueError: an option is out of range.
    """
    if name not in _CIFAR:
        raise ValueError(f"expected name to be one of {', '.join(_CIFAR)}, got name={name!r}")
    reader, folder, mean, std = _CIFAR[name]
    read = getattr(need("torchvision.datasets", "vision"), reader)
    try:
        train, published_test = (read(str(root), train=part, download=download) for part in (True, False))
    except RuntimeError as error:
        if not (Path(root) / folder).is_dir():
            raise FileNotFoundError(
                f"expected the folder {Path(root) / folder}, which is not there: set tasks.root=DIR to the folder "
                "that holds it, or tasks.download=true"
            ) from error
        raise OSError(
            f"expected {Path(root) / folder} to hold the published files, some are missing or changed: delete it and "
            "set tasks.download=true"
        ) from error
    pair, test = (
        (torch.as_tensor(part.data).permute(0, 3, 1, 2).contiguous(), torch.as_tensor(part.targets))
        for part in (train, published_test)
    )
    data = {**_divided(pair, validation, None, split_seed), "test": test}
    return _supervised(
        name,
        data,
        _Options(classes, per_class, fraction, noise, noise_kind),
        {"source": f"{folder}, published test set", "split_seed": split_seed},
        names=list(train.classes), confusions=CIFAR10_CONFUSIONS if name == "cifar10" else None,
        mean=torch.tensor(mean).view(3, 1, 1), std=torch.tensor(std).view(3, 1, 1),
        batch_size=batch_size, seed=seed, holdout=holdout, val_fraction=val_fraction, augment=augment,
    )  # fmt: skip


_CIFAR = {
    "cifar10": ("CIFAR10", "cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ("CIFAR100", "cifar-100-python", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
"""Reader in torchvision, folder, and mean and standard deviation of the channels of the 50,000."""


def image_folder(
    root: str | Path,
    *,
    image_size: int = 32,
    color: bool = True,
    standardize: bool = True,
    validation: float = 0.1,
    test: float = 0.2,
    split_seed: int = 0,
    classes: int | None = None,
    per_class: int | None = None,
    fraction: float | None = None,
    noise: float = 0.0,
    noise_kind: str = "symmetric",
    batch_size: int = 128,
    seed: int = 0,
    holdout: float = 0.0,
    val_fraction: float = 0.25,
    augment: str | None = None,
) -> Supervised:
    """Return the images of ``root/<class>/*.png``, or of ``root/{train,val,test}/<class>/*.png``.

    The parts may be called training, valid, validation, dev or testing too, in any case; no class can have such a name.
    Any format that Pillow reads will do. Images are cropped to a square about their centre, resized to ``image_size``
    and held as uint8 in memory. A split without a folder is taken out of the training images: ``validation`` and
    ``test`` are numbers of images, or shares of them below 1, each class in proportion. ``color``: False reads shades
    of grey. ``standardize``: subtract the mean of each channel over the training images that are used, and divide by
    the standard deviation. The other options are those of the module.

    Raises:
        ImportError: Pillow is not installed.
        FileNotFoundError: the folder is not there, or there are no images in it.
        OSError: an image cannot be read; the message names it.
        ValueError: an option is out of range.
    """
    size, root = check_count("image_size", image_size), Path(root)
    names, files = folder_files(root)
    data = {split: read_folder(paths, names, size, color) for split, paths in files.items()}
    return _supervised(
        root.resolve().name or "images",
        _completed(data, validation, test, split_seed),
        _Options(classes, per_class, fraction, noise, noise_kind),
        {"source": "image folder", **_divisions(data, validation, test, split_seed), "class_names": names},
        names=names, standardize=standardize,
        batch_size=batch_size, seed=seed, holdout=holdout, val_fraction=val_fraction, augment=augment,
    )  # fmt: skip


def npz(
    path: str | Path,
    *,
    standardize: bool = True,
    validation: float = 0.1,
    test: float = 0.2,
    split_seed: int = 0,
    classes: int | None = None,
    per_class: int | None = None,
    fraction: float | None = None,
    noise: float = 0.0,
    noise_kind: str = "symmetric",
    batch_size: int = 128,
    seed: int = 0,
    holdout: float = 0.0,
    val_fraction: float = 0.25,
    augment: str | None = None,
) -> Supervised:
    """Return the arrays of a ``.npz`` file.

    They are called ``images`` and ``labels``, or ``x`` and ``y``. Further splits have ``train``, ``val`` (or
    ``validation``, ``dev``) or ``test`` after the name or before it: ``x_test``, ``test_images``. A missing split is
    taken out of the training examples: ``validation`` and ``test`` are numbers of examples, or shares of them below 1,
    each class in proportion. Inputs are uint8 or float, images ``[N, H, W]``, ``[N, C, H, W]`` or ``[N, H, W, C]`` of
    1, 3 or 4 channels, or features ``[N, F]``. Labels are integers ``[N]`` or ``[N, 1]`` from 0 on. ``standardize``:
    subtract the mean of each channel (or feature) over the training examples that are used, and divide by the standard
    deviation. The other options are those of the module.

    Raises:
        ImportError: numpy is not installed.
        FileNotFoundError: the file is not there.
        ValueError: it is not such a file, it holds Python objects, or an option is out of range.
    """
    path = Path(path)
    data = read_npz(path)
    return _supervised(
        path.stem,
        _completed(data, validation, test, split_seed),
        _Options(classes, per_class, fraction, noise, noise_kind),
        {"source": path.name, **_divisions(data, validation, test, split_seed)},
        standardize=standardize,
        batch_size=batch_size, seed=seed, holdout=holdout, val_fraction=val_fraction, augment=augment,
    )  # fmt: skip


def _completed(data: Mapping[str, Examples], validation: float, test: float, split_seed: int) -> dict[str, Examples]:
    """Return the three splits; those that ``data`` lacks are taken out of its training examples."""
    missing = {"validation": validation, "test": test}
    asked = {split: None if split in data else value for split, value in missing.items()}
    return {**data, **_divided(data["train"], asked["validation"], asked["test"], split_seed)}


def _divisions(data: Mapping[str, Examples], validation: float, test: float, split_seed: int) -> dict[str, Any]:
    """Return where each split comes from, as facts."""
    taken = {k: v for k, v in (("validation", validation), ("test", test)) if k not in data}
    return {"split_seed": split_seed if taken else None, "taken_from_training": taken}


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
        count = count_of(name, asked, len(rest), of=len(y))
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
    limit, per_class, fraction, noise, kind = options
    seed = check_count("seed", stream["seed"], least=0)
    noise = check_noise(noise, kind)
    there = len(names) if names is not None else 1 + max(int(y.max()) for _, y in data.values())
    classes = there if limit is None else check_count("classes", limit, least=2)
    if classes > there:
        raise ValueError(f"expected classes to be at most {there}, which {name} has, got classes={classes}")
    if classes < there:
        data = {split: (x[y < classes], y[y < classes]) for split, (x, y) in data.items()}
    x, y = data["train"]

    def named(c: int) -> str | int:
        return names[c] if names else c

    if per_class is not None and fraction is not None:
        raise ValueError(f"expected per_class or fraction, got per_class={per_class} and fraction={fraction}: drop one")
    key = task_keys(seed, _LIMIT, [0])[0]
    if per_class is not None:
        count = check_count("per_class", per_class)
        sizes = y.bincount(minlength=classes)
        short = (sizes < count).nonzero().flatten().tolist()
        if short:
            c = short[0]
            raise ValueError(
                f"class {named(c)!r} of {name} has {int(sizes[c])} training examples, per_class="
                f"{count} needs {count}: set per_class={int(sizes.min())} or less"
            )
        chosen = take(y, torch.full((classes,), count), key)
        x, y = x[chosen], y[chosen]
    elif fraction is not None:
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ValueError(f"expected fraction to be above 0 and at most 1, got fraction={fraction!r}")
        total = round(fraction * len(y))
        if not total:
            raise ValueError(f"fraction={fraction} of {len(y)} training examples is none: set a larger fraction")
        chosen = share(y, total, key)
        x, y = x[chosen], y[chosen]
    empty = (y.bincount(minlength=classes) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"class {named(empty[0])!r} of {name} has no training example left, it needs 1: "
            + ("set a larger fraction, or per_class=1" if fraction is not None else "add some, or leave the class out")
        )
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
    others = data["validation"], data["test"]
    return Supervised((x, y), *others, classes=classes, name=name, description=facts, **stream)


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
