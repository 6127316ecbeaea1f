"""N-way K-shot episodes out of labelled images. Drawing an episode works on indices alone; pixels are read once, last.

Episode ``i`` is a pure function of (seed, split, i), see `metasam.tasks.counter`. In it, support and query images
differ, and the chosen classes are labelled in random order: one fixed labelling of a class set would let a head
memorise it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metasam.tasks.counter import bits, fold, task_keys, uniform
from metasam.tasks.family import SPLITS, check_count, check_split
from metasam.tasks.warp import warp as warped
from metasam.types import Task

_LAST = 2**63 - 1
_NOISE, _CLASSES = 0x6E6F6973, 0x636C6173  # streams of a seed that nothing else uses


class Episodes(NamedTuple):
    """Indices of a batch of T episodes; position ``w`` on the last axis is the class labelled ``w``."""

    classes: Tensor
    """Position in the pools, ``[T, ways]``."""
    support: Tensor
    """Image indices ``[T, shots, ways]``."""
    query: Tensor
    """Image indices ``[T, queries, ways]``."""


class EpisodeSampler:
    """Draws episodes as image indices, a whole batch at a time, without touching an image.

    Classes and images are drawn uniformly without replacement: each candidate gets a random key, the largest keys win.
    The cost of an episode is one hash for each class and for each image of the chosen classes.

    Args:
        pools: for each class the indices of its images; lengths may differ.
        ways: classes in an episode.
        shots: support images a class.
        queries: query images a class.
        seed: of all episodes.
        split: "train", "validation" or "test"; each has its own stream of episodes.
        names: of the classes, for error messages; default: their positions.

    Raises:
        ValueError: a number is too small, the split is unknown, or the pools cannot fill an episode.

    >>> sampler = EpisodeSampler([range(0, 4), range(4, 9), range(9, 12)], ways=2, shots=1, queries=2)
    >>> classes, support, query = sampler(range(100))
    >>> support.shape, query.shape
    (torch.Size([100, 1, 2]), torch.Size([100, 2, 2]))
    """

    def __init__(
        self,
        pools: Sequence[Sequence[int] | Tensor],
        ways: int = 5,
        shots: int = 1,
        queries: int = 15,
        seed: int = 0,
        split: str = "train",
        names: Sequence[str] | None = None,
    ) -> None:
        self.ways, self.shots = check_count("ways", ways, least=2), check_count("shots", shots)
        self.queries, self.seed = check_count("queries", queries), check_count("seed", seed, least=0)
        self.split = check_split(split)
        if len(pools) < ways:
            raise ValueError(
                f"{ways}-way episodes need {ways} classes, split {split!r} has {len(pools)}: "
                f"set ways={len(pools)} or fewer, or add classes"
            )
        for c, pool in enumerate(pools):
            if len(pool) < shots + queries:
                raise ValueError(
                    f"class {(names[c] if names else c)!r} of split {split!r} has {len(pool)} images, but {shots} "
                    f"shots + {queries} queries need {shots + queries}: lower shots or queries, or leave the class out"
                )
        self._sizes = torch.tensor([len(pool) for pool in pools])
        self._table = torch.zeros(len(pools), int(self._sizes.max()), dtype=torch.int64)
        for row, pool in zip(self._table, pools, strict=True):
            row[: len(pool)] = torch.as_tensor(pool)
        self._ragged = bool((self._sizes < self._table.shape[1]).any())

    def __call__(self, tasks: Sequence[int] | Tensor) -> Episodes:
        """Return the episodes of these numbers.

        Raises:
            ValueError: a number is negative.
        """
        classes, index = self.draw(tasks)
        return Episodes(classes, index[:, : self.shots], index[:, self.shots :])

    def draw(self, tasks: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Return the classes of these episodes, and their images ``[T, shots + queries, ways]``, support first.

        Raises:
            ValueError: a number is negative.
        """
        count, longest = self._table.shape
        drawn = bits(self.keys(tasks), count + self.ways * longest)
        # topk sorts what it returns, so the classes come in random order: that order is the labelling
        classes = drawn[:, :count].topk(self.ways).indices
        order = drawn[:, count:].unflatten(-1, (self.ways, longest))
        if self._ragged:
            order.clamp_(min=1 - _LAST).masked_fill_(torch.arange(longest) >= self._sizes[classes, None], -_LAST)
        chosen = order.topk(self.shots + self.queries).indices.add_(classes.unsqueeze(-1), alpha=longest)
        return classes, self._table.take(chosen.transpose(1, 2))

    def keys(self, tasks: Sequence[int] | Tensor) -> Tensor:
        """Return the random key of each of these episodes, ``[T]``."""
        return task_keys(self.seed, SPLITS.index(self.split), tasks)


def _tensor(array: Any) -> Tensor:
    """Return ``array`` as a tensor that shares its memory where it can; a read-only memory map stays one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nor do we write
        try:
            return torch.as_tensor(array)
        except (TypeError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"expected a tensor or an array of numbers, got {type(array).__name__}: {error}"
            ) from error


def _check_images(split: str, images: Tensor) -> Tensor:
    if images.ndim != 4 or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise ValueError(
            f"expected {split} images as uint8 or float [N, C, H, W], got {images.dtype} {list(images.shape)}: "
            "put channels before height and width, and pass uint8 as it is (it is divided by 255 a batch at a time)"
        )
    if images.is_floating_point():
        # in pieces, so that a memory map is never in memory as a whole
        for start in range(0, len(images), 1024):
            finite = images[start : start + 1024].isfinite().flatten(1).all(1)
            if not finite.all():
                first = start + int(finite.long().argmin())
                raise ValueError(
                    f"expected finite {split} images, image {first} holds NaN or infinity: repair or drop it"
                )
    return images


def _check_labels(split: str, labels: Tensor, images: int, names: Sequence[str] | None) -> Tensor:
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"expected integer {split} labels [N], got {labels.dtype} {list(labels.shape)}")
    if len(labels) != images:
        raise ValueError(f"expected one label for each of {images} {split} images, got {len(labels)} labels")
    labels = labels.long()
    top = len(names) if names is not None else _LAST
    wrong = (labels < 0) | (labels >= top)
    if wrong.any():
        first = int(wrong.long().argmax())
        bound = f"0 to {top - 1}, as {top} class names were given" if names is not None else ">= 0"
        raise ValueError(f"expected {split} labels {bound}; label {first} is {int(labels[first])}")
    return labels


class ImageEpisodes:
    """A task family from arrays of labelled images, one pair for each split.

    Examples of a support or query set are ordered round by round, labels ``0, 1, .., ways-1, 0, 1, ..``, so that a
    contiguous part of a set (the shards of m-SAM) is as balanced as it can be.

    Args:
        data: split -> (images, labels). Images are ``[N, C, H, W]``: uint8, divided by 255 after gathering, or float,
            used as they are. Labels are integers ``[N]``. Tensors and arrays are not copied, so they may be
            memory-mapped.
        ways: classes in an episode.
        shots: support images a class.
        queries: query images a class.
        seed: of all episodes.
        rotations: add each training class turned by 90, 180 and 270 degrees as three new classes (Santoro et al., ICML
            2016): class ``c`` turned ``r`` times counter-clockwise is class ``4 c + r``. Other splits are left alone.
        warp: strength of random affine maps of training images, see `metasam.tasks.warp`: one for a class in an
            episode, which makes it a new class, and a smaller one for each image. 0: none; 1: up to 30 degrees.
        noise: probability that the label of a support image is wrong, some other class of the episode; in every split,
            as who adapts on noisy labels does so at test time too. Query labels are right.
        classes: only so many training classes, chosen by the seed (before rotations); None: all.
        class_names: name of every label. A label then means the same class in every split, and no two splits may
            share it.
        name: of the family.
        absent: split -> why it does not exist and what to use instead, for the error when it is asked for.

    Raises:
        ValueError: images or labels do not fit this description, or a split cannot fill an episode.

    >>> images, labels = torch.randint(256, (60, 1, 28, 28), dtype=torch.uint8), torch.arange(60) % 6
    >>> family = ImageEpisodes({"train": (images, labels)}, ways=3, shots=1, queries=2)
    >>> task = family.batch("train", [0, 1])
    >>> task.query[0].shape, task.query[1][0]
    (torch.Size([2, 6, 1, 28, 28]), tensor([0, 1, 2, 0, 1, 2]))
    """

    classification = True

    def __init__(
        self,
        data: Mapping[str, tuple[Any, Any]],
        *,
        ways: int = 5,
        shots: int = 1,
        queries: int = 15,
        seed: int = 0,
        rotations: bool = False,
        warp: float = 0.0,
        noise: float = 0.0,
        classes: int | None = None,
        class_names: Sequence[str] | None = None,
        name: str = "images",
        absent: Mapping[str, str] | None = None,
    ) -> None:
        if not data:
            raise ValueError("expected images of at least one split, got none")
        if not 0 <= warp <= 2:
            raise ValueError(f"expected warp between 0 (none) and 2, got warp={warp}")
        if not 0 <= noise < 1:
            raise ValueError(f"expected noise to be a probability below 1, got noise={noise}")
        self.name, self.rotations, self.warp, self.noise = name, rotations, warp, noise
        self._absent = dict(absent or {})
        self._images: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] = {}
        self._samplers: dict[str, EpisodeSampler] = {}
        self._classes: dict[str, list[str]] = {}
        for split, (images, labels) in data.items():
            check_split(split)
            images = _check_images(split, _tensor(images))
            labels = _check_labels(split, _tensor(labels), len(images), class_names)
            present, sizes = labels.unique(return_counts=True)
            pools = list(labels.argsort(stable=True).split(sizes.tolist()))
            if split == "train" and classes is not None:
                chosen = _some(check_count("classes", classes, least=2), len(pools), seed)
                present, pools = present[chosen], [pools[c] for c in chosen]
            names = [class_names[c] if class_names is not None else str(c) for c in present.tolist()]
            self._images[split], self._classes[split] = images, names
            if rotations and split == "train":
                if images.shape[2] != images.shape[3]:
                    raise ValueError(f"rotations need square images, got {list(images.shape[2:])}: set rotations=False")
                pools = [pool for pool in pools for _ in range(4)]
                names = [f"{name}/{90 * r}" for name in names for r in range(4)]
            sampler = self._samplers[split] = EpisodeSampler(pools, ways, shots, queries, seed, split, names)
            self._rows[split] = _rows(images)
        shapes = {split: tuple(images.shape[1:]) for split, images in self._images.items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"expected images of one shape in all splits, got {shapes}")
        if class_names is not None:
            _check_disjoint(self._classes)
        self.output_size = self.ways = sampler.ways
        self.shots, self.queries, self.seed = sampler.shots, sampler.queries, sampler.seed
        self.input_shape: tuple[int, ...] = next(iter(shapes.values()))

    def batch(self, split: str, tasks: Sequence[int]) -> Task:
        """Return the episodes of these numbers.

        Inputs are float32 ``[T, n ways, C, H, W]``, in [0, 1] if images are uint8; labels are int64 ``[T, n ways]``.

        Raises:
            ValueError: the split is unknown or absent, or a number is negative.
        """

        def convert(t: Tensor) -> Tensor:
            if t.dtype == torch.uint8:
                return t.to(torch.float32).div_(255)
            return t.to(torch.float32) if t.is_floating_point() else t

        task = self.raw(split, tasks).map(convert)
        if not self.warp or split != "train":
            return task
        images = torch.cat([task.support[0], task.query[0]], dim=1).unflatten(1, (-1, self.ways))
        images = warped(images, self._samplers[split].keys(tasks), self.warp).flatten(1, 2)
        return Task(
            support=(images[:, : self.ways * self.shots], task.support[1]),
            query=(images[:, self.ways * self.shots :], task.query[1]),
        )

    def raw(self, split: str, tasks: Sequence[int]) -> Task:
        """Return `batch` before warping, with images in their stored dtype: a quarter of the time and of the bytes.

        Raises:
            ValueError: as `batch`.
        """
        classes, index = self._sampler(split).draw(tasks)
        kind = self._images[split]
        images = self._rows[split].index_select(0, index.flatten()).view(kind.dtype)
        images = images.reshape(*index.shape, *kind.shape[1:])
        if self.rotations and split == "train":
            by_class = images.transpose(1, 2)
            for turns in (1, 2, 3):
                turned = classes % 4 == turns
                by_class[turned] = by_class[turned].rot90(turns, (-2, -1))

        def example(part: Tensor) -> tuple[Tensor, Tensor]:
            return part.flatten(1, 2), torch.arange(self.ways).expand(part.shape[:3]).flatten(1)

        task = Task(support=example(images[:, : self.shots]), query=example(images[:, self.shots :]))
        if not self.noise:
            return task
        x, y = task.support
        return Task((x, self._spoilt(y, self._sampler(split).keys(tasks))), task.query)

    def _spoilt(self, labels: Tensor, keys: Tensor) -> Tensor:
        """Make each label wrong with probability ``noise``: one of the others, all alike."""
        wrong, other = uniform(fold(keys, _NOISE), 2 * labels.shape[1]).unflatten(1, (2, -1)).unbind(1)
        moved = (labels + 1 + (other * (self.ways - 1)).long()) % self.ways
        return torch.where(wrong < self.noise, moved, labels)

    def size(self, split: str) -> int | None:
        """Return None: episodes are endless.

        Raises:
            ValueError: the split is unknown or absent.
        """
        self._sampler(split)
        return None

    def class_names(self, split: str) -> list[str]:
        """Return the names of a split's classes, rotations not counted.

        Raises:
            ValueError: the split is unknown or absent.
        """
        self._sampler(split)
        return list(self._classes[split])

    def describe(self) -> dict[str, Any]:
        """Return the settings of the episodes, and for each split its numbers of classes and images."""
        return {
            "name": self.name,
            "ways": self.ways,
            "shots": self.shots,
            "queries": self.queries,
            "seed": self.seed,
            "rotations": self.rotations,
            "warp": self.warp,
            "noise": self.noise,
            "splits": {
                split: {"classes": len(self._classes[split]), "images": len(images)}
                for split, images in self._images.items()
            },
        }

    def _sampler(self, split: str) -> EpisodeSampler:
        if check_split(split) not in self._samplers:
            why = self._absent.get(split, f"pass its images as data={{{split!r}: (images, labels)}}")
            raise ValueError(f"{self.name} has no {split!r} split, only {', '.join(self._samplers)}: {why}")
        return self._samplers[split]


def _some(count: int, there: int, seed: int) -> list[int]:
    """Choose ``count`` of ``there`` training classes, those of a smaller number among those of a larger one."""
    if count > there:
        raise ValueError(f"expected classes to be at most {there}, the training classes there are, got classes={count}")
    order = bits(task_keys(seed, _CLASSES, [0])[0], there).argsort()
    return sorted(order[:count].tolist())


def _rows(images: Tensor) -> Tensor:
    """View images as rows ``[N, ...]`` to gather from, never a copy; eight bytes at a time is the fastest."""
    if not images.is_contiguous():
        return images
    rows = images.view(len(images), -1)
    width = rows.shape[1] * rows.element_size()
    aligned = width % 8 == 0 and rows.storage_offset() * rows.element_size() % 8 == 0
    return rows.view(torch.int64) if aligned else rows


def _check_disjoint(classes: Mapping[str, Sequence[str]]) -> None:
    owner: dict[str, str] = {}
    for split, names in classes.items():
        for name in names:
            if owner.setdefault(name, split) != split:
                raise ValueError(
                    f"class {name!r} is in both {owner[name]!r} and {split!r}: give each class to one split"
                )
