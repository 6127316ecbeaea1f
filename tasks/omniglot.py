"""Omniglot: 1,623 handwritten characters of 50 alphabets, each drawn once by 20 people.

Lake, Salakhutdinov & Tenenbaum, "Human-level concept learning through probabilistic program induction", Science 2015.
Read from the published files: the complete sets (``images_background``, 30 alphabets, and ``images_evaluation``,
20), the two minimal sets (``images_background_small1`` and ``..._small2``, five alphabets each) and the 20
within-alphabet one-shot runs (``all_runs``), each as a folder or as its zip. Pictures become ink 1 on paper 0,
reduced from 105x105 with Pillow's antialiasing Lanczos filter.

Every protocol divides characters, (alphabet, number), among its splits; no character is in two of them.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metasam.tasks.cache import cached, need, progress
from metasam.tasks.counter import bits, fold
from metasam.tasks.episodes import ImageEpisodes
from metasam.tasks.family import check_split
from metasam.types import Task

_log = logging.getLogger(__name__)

CHARACTERS = {
    "images_background": 964,
    "images_evaluation": 659,
    "images_background_small1": 136,
    "images_background_small2": 156,
}
"""Published number of characters of each set."""

_FULL = ("images_background", "images_evaluation")
_SMALL = ("images_background_small1", "images_background_small2")
_SMALL1 = ("Balinese", "Early_Aramaic", "Greek", "Korean", "Latin")
_SMALL2 = ("Greek", "Japanese_(katakana)", "Latin", "Sanskrit", "Tagalog")

# protocol -> split -> alphabets. Greek and Latin are in both minimal sets, with the same drawings.
_MINIMAL: dict[str, dict[str, tuple[str, ...]]] = {
    "minimal1": {"train": _SMALL1, "validation": ("Japanese_(katakana)", "Sanskrit", "Tagalog")},
    "minimal2": {"train": _SMALL2, "validation": ("Balinese", "Early_Aramaic", "Korean")},
    "minimal": {
        "train": ("Greek", "Japanese_(katakana)", "Korean", "Latin"),
        "validation": ("Early_Aramaic",),
        "test": ("Balinese", "Sanskrit", "Tagalog"),
    },
}
PROTOCOLS = ("vinyals", "random", "background/evaluation", *_MINIMAL)

Drawing = tuple[str, str, bytes]
"""Alphabet, character, PNG file."""


class Omniglot(ImageEpisodes):
    """Episodes of Omniglot characters.

    ``split`` is the protocol that divides the characters:

    - ``"vinyals"``: 1028/172/423 of Vinyals et al. (2016), read from the published lists
      ``splits/vinyals/{train,val,test}.txt`` under ``root`` (lines ``Alphabet/characterNN``, with or without
      ``/rotNNN``). Without the lists it is refused.
    - ``"random"``: 1,200 training and 423 test characters out of all, shuffled by ``split_seed`` (Santoro et al.,
      2016); the last ``validation_classes`` of the 1,200 are held out for validation.
    - ``"background/evaluation"``: Lake's; test on the evaluation alphabets, validate on every sixth background
      alphabet, from the last in alphabetical order (Tifinagh, Mkhedruli, Inuktitut, Early Aramaic, Balinese).
    - ``"minimal1"``: train on the five alphabets of small1, validate on Katakana, Sanskrit, Tagalog of small2 (if
      that is there). The test is `OmniglotOneShot`.
    - ``"minimal2"``: train on the five of small2, validate on Balinese, Early Aramaic, Korean of small1.
    - ``"minimal"``: train on Early Aramaic, Greek, Katakana, Korean, Latin (159 characters), test on Balinese,
      Sanskrit, Tagalog (83). With ``holdout``, Early Aramaic (22) is held out of training for validation.

    Args:
        root: folder that holds the published folders or zips, or an ``omniglot-py`` folder with them.
        split: the protocol.
        ways: classes in an episode.
        shots: support images a class.
        queries: query images a class; there are 20 drawings of each character.
        seed: of the episodes.
        rotations: add training characters turned by 90, 180 and 270 degrees as new classes; None: as published,
            which is True for "vinyals" and "random" and False elsewhere.
        warp: random affine maps of training characters, see `ImageEpisodes`.
        noise: share of wrong labels in support sets, see `ImageEpisodes`.
        classes: number of training characters; None: all.
        image_size: height and width in pixels; 105 is the original.
        download: fetch the complete sets with torchvision first, where they are missing.
        split_seed: shuffles the characters of "random".
        validation_classes: of "random"; 0 trains on all 1,200.
        holdout: of "minimal".

    Raises:
        FileNotFoundError: the data, or the lists of "vinyals", are not under ``root``.
        OSError: a zip or a picture is damaged, or not what its name says.
        ValueError: an argument does not fit the data.
        ImportError: numpy or Pillow, or torchvision for the download, is not installed.
    """

    def __init__(
        self,
        root: str | Path,
        split: str = "random",
        ways: int = 5,
        shots: int = 1,
        queries: int = 15,
        seed: int = 0,
        rotations: bool | None = None,
        warp: float = 0.0,
        noise: float = 0.0,
        classes: int | None = None,
        image_size: int = 28,
        download: bool = False,
        split_seed: int = 0,
        validation_classes: int = 100,
        holdout: bool = True,
    ) -> None:
        if split not in PROTOCOLS:
            raise ValueError(f"expected split to be one of {', '.join(map(repr, PROTOCOLS))}, got {split!r}")
        self.protocol, self.split_seed = split, split_seed
        if download:
            _download(Path(root))
        root, absent = _base(Path(root)), {}
        # read before the pictures, as it is what most often misses
        lists = _vinyals_lists(root) if split == "vinyals" else {}
        sets = _minimal_sets(root, split) if split in _MINIMAL else {name: _read(root, name) for name in _FULL}
        drawings = [drawing for members in sets.values() for drawing in members]
        names = sorted({f"{alphabet}/{character}" for alphabet, character, _ in drawings})
        if split == "vinyals":
            parts = _named(lists, names)
        elif split == "random":
            parts = _random(names, split_seed, validation_classes)
            absent["validation"] = "set validation_classes to 100, say"
        elif split == "background/evaluation":
            parts = _by_background(names, {alphabet for alphabet, _, _ in sets["images_background"]})
        else:
            parts, absent = _minimal(names, split, holdout)
        images = _decode_all(drawings, image_size)
        label = {name: i for i, name in enumerate(names)}
        labels = torch.tensor([label[f"{alphabet}/{character}"] for alphabet, character, _ in drawings])
        data = {}
        for part, members in parts.items():
            inside = torch.isin(labels, torch.tensor([label[name] for name in members]))
            data[part] = (images[inside], labels[inside])
        if "train" not in data:
            raise ValueError(f"no training characters under {root} for split={split!r}: the copy is incomplete")
        super().__init__(
            data,
            ways=ways,
            shots=shots,
            queries=queries,
            seed=seed,
            rotations=split in ("vinyals", "random") if rotations is None else rotations,
            warp=warp,
            noise=noise,
            classes=classes,
            class_names=names,
            name="omniglot",
            absent=absent,
        )

    def alphabets(self, split: str) -> list[str]:
        """Return the alphabets that a split draws from, sorted.

        Raises:
            ValueError: the split is unknown or absent.
        """
        return sorted({name.split("/")[0] for name in self.class_names(split)})

    def describe(self) -> dict[str, Any]:
        """Return the facts of `ImageEpisodes.describe`, protocol, image size, and the alphabets of each split."""
        facts = super().describe() | {"protocol": self.protocol, "image_size": self.input_shape[-1]}
        if self.protocol == "random":
            facts["split_seed"] = self.split_seed
        for split, entry in facts["splits"].items():
            entry["alphabets"] = self.alphabets(split)
        return facts


class OmniglotOneShot:
    """The 20 within-alphabet one-shot runs of Lake et al.: 20 ways, one support image a class, 20 query images a run.

    There is only the split "test", of 20 tasks: task ``i`` is ``run{i+1:02}``, label ``w`` is ``class{w+1:02}.png``.
    Published error rates: people 4.5 %, modified Hausdorff distance 38.8 % (see `metasam.tasks.baselines`).

    Args:
        root: folder that holds ``all_runs.zip`` or the folder ``all_runs``, or an ``omniglot-py`` folder with them.
        image_size: height and width in pixels; 105 is the original.

    Raises:
        FileNotFoundError: the runs are not under ``root``.
        OSError: the zip or a picture is damaged.
        ValueError: a run lacks a file or has a label that is no class.
        ImportError: numpy or Pillow is not installed.
    """

    output_size = ways = 20
    shots = queries = 1
    classification = True

    def __init__(self, root: str | Path, image_size: int = 28) -> None:
        files = _files(_base(Path(root)), "all_runs")
        # a zip of the folder, rather than of its content, has one level more
        files = {"/".join(name.split("/")[name.startswith("all_runs/") :]): content for name, content in files.items()}
        supports, queries, labels = [], [], []
        for run in (f"run{r:02}" for r in range(1, 21)):
            answers = dict(
                line.split() for line in _member(files, f"{run}/class_labels.txt").decode().splitlines() if line
            )
            classes = [f"{run}/training/class{w:02}.png" for w in range(1, 21)]
            items = [f"{run}/test/item{q:02}.png" for q in range(1, 21)]
            if set(answers) != set(items) or not set(answers.values()) <= set(classes):
                raise ValueError(
                    f"expected {run}/class_labels.txt to give each item a class of the run: get all_runs.zip anew"
                )
            supports += [_member(files, name) for name in classes]
            queries += [_member(files, name) for name in items]
            labels.append([classes.index(answers[name]) for name in items])
        images = _decode_all([("", "", png) for png in supports + queries], image_size).view(
            2, 20, 20, 1, *[image_size] * 2
        )
        self._support, self._query = images
        self._labels = torch.tensor(labels)
        self.input_shape: tuple[int, ...] = (1, image_size, image_size)

    def batch(self, split: str, tasks: Sequence[int]) -> Task:
        """Return these runs: inputs float32 ``[T, 20, 1, size, size]`` in [0, 1], labels int64 ``[T, 20]``.

        Raises:
            ValueError: the split is not "test", or a number is not in 0..19.
        """
        count = self.size(split)
        index = torch.as_tensor(list(tasks), dtype=torch.int64)
        if ((index < 0) | (index >= count)).any():
            raise ValueError(f"expected task numbers 0 to {count - 1}, got {list(tasks)}")
        x, y = (part[index].to(torch.float32).div_(255) for part in (self._support, self._query))
        return Task(support=(x, torch.arange(20).repeat(len(index), 1)), query=(y, self._labels[index]))

    def size(self, split: str) -> int:
        """Return 20.

        Raises:
            ValueError: the split is not "test".
        """
        if check_split(split) != "test":
            raise ValueError(
                f"the one-shot runs have no {split!r} split, only 'test': train on Omniglot(..., split='minimal1')"
            )
        return len(self._labels)

    def describe(self) -> dict[str, Any]:
        """Return name, ways, shots, queries in a run, image size and number of runs."""
        facts = {"ways": 20, "shots": 1, "queries": 20, "image_size": self.input_shape[-1]}
        return {
            "name": "omniglot_oneshot",
            **facts,
            "splits": {"test": {"tasks": len(self._labels), "ways": "within alphabet"}},
        }


# Protocols: names of all characters -> names of each split


def _minimal(names: list[str], protocol: str, holdout: bool) -> tuple[dict[str, list[str]], dict[str, str]]:
    absent: dict[str, str] = {}
    alphabets = dict(_MINIMAL[protocol])
    if protocol == "minimal":
        if not holdout:
            alphabets["train"] += alphabets.pop("validation")
            absent["validation"] = "Early Aramaic is trained on; set holdout=True to validate on it"
    else:
        absent["test"] = "its test is the one-shot runs, OmniglotOneShot(root) (tasks=omniglot_oneshot)"
        absent["validation"] = f"its alphabets are in {_SMALL[protocol == 'minimal1']}.zip, which is not under root"
    there = {name.split("/")[0] for name in names}
    parts = {}
    for split, chosen in alphabets.items():
        missing = sorted(set(chosen) - there)
        if missing and (split not in absent or len(missing) < len(chosen)):
            raise ValueError(
                f"{protocol!r} needs the alphabets {', '.join(missing)} for {split}: the copy is incomplete"
            )
        if not missing:
            parts[split] = [name for name in names if name.split("/")[0] in chosen]
    return parts, absent


def _random(names: list[str], seed: int, validation: int) -> dict[str, list[str]]:
    if len(names) <= 1200 or not 0 <= validation < 1200:
        raise ValueError(
            f"split='random' needs more than 1200 characters and validation_classes in 0..1199, got {len(names)} "
            f"characters and validation_classes={validation}: get the complete sets (download=True)"
        )
    order = bits(fold(torch.tensor(seed), 0), len(names)).argsort().tolist()
    shuffled = [names[i] for i in order]
    parts = {
        "train": shuffled[: 1200 - validation],
        "validation": shuffled[1200 - validation : 1200],
        "test": shuffled[1200:],
    }
    return {split: members for split, members in parts.items() if members}


def _by_background(names: list[str], background: set[str]) -> dict[str, list[str]]:
    held_out = sorted(background)[::-6]
    parts: dict[str, list[str]] = {}
    for name in names:
        alphabet = name.split("/")[0]
        part = "test" if alphabet not in background else "validation" if alphabet in held_out else "train"
        parts.setdefault(part, []).append(name)
    return parts


def _vinyals_lists(root: Path) -> dict[str, list[str]]:
    folder = root / "splits" / "vinyals"
    files = {"train": folder / "train.txt", "validation": folder / "val.txt", "test": folder / "test.txt"}
    if missing := [str(file) for file in files.values() if not file.is_file()]:
        raise FileNotFoundError(
            f"split='vinyals' is read from its published lists, missing here: {', '.join(missing)}. Put them "
            "there (lines Alphabet/characterNN or Alphabet/characterNN/rotNNN), or use split='random'"
        )
    lines = {split: file.read_text().split() for split, file in files.items()}
    return {split: sorted({"/".join(line.split("/")[:2]) for line in entries}) for split, entries in lines.items()}


def _named(lists: dict[str, list[str]], names: list[str]) -> dict[str, list[str]]:
    for split, members in lists.items():
        if unknown := sorted(set(members) - set(names)):
            raise ValueError(
                f"the vinyals list of {split!r} names {len(unknown)} characters that the data lacks, first "
                f"{unknown[0]!r}: the copy of the data is incomplete, or the list is not of Omniglot"
            )
    return lists


# Files


def _base(root: Path) -> Path:
    return root / "omniglot-py" if (root / "omniglot-py").is_dir() else root


def _download(root: Path) -> None:
    omniglot = need("torchvision.datasets", "vision").Omniglot
    for background in (True, False):
        omniglot(str(root), background=background, download=True)


def _minimal_sets(root: Path, protocol: str) -> dict[str, list[Drawing]]:
    """Return the drawings of the protocol's alphabets, each once: out of the minimal sets, or of the complete one."""
    unseen = {alphabet for chosen in _MINIMAL[protocol].values() for alphabet in chosen}
    needed = {"minimal1": _SMALL[:1], "minimal2": _SMALL[1:]}.get(protocol, _SMALL)
    there = [name for name in _SMALL if _exists(root, name)]
    if not there and _exists(root, "images_background"):
        needed = ("images_background",)
    sets = {}
    for name in sorted({*needed, *there}):
        sets[name] = [drawing for drawing in _read(root, name) if drawing[0] in unseen]
        unseen -= {alphabet for alphabet, _, _ in sets[name]}
    return sets


def _exists(root: Path, name: str) -> bool:
    return (root / name).is_dir() or (root / f"{name}.zip").exists()


def _read(root: Path, name: str) -> list[Drawing]:
    """Return the drawings of a published set, sorted."""
    files = _files(root, name)
    paths = [(path, path.split("/")) for path in sorted(files) if path.endswith(".png")]
    drawings = [(parts[-3], parts[-2], files[path]) for path, parts in paths if len(parts) >= 3]
    characters = {(alphabet, character) for alphabet, character, _ in drawings}
    if not drawings:
        raise OSError(f"expected <Alphabet>/<characterNN>/*.png in {root / name}, found none: get {name}.zip anew")
    if len(characters) != CHARACTERS[name]:
        _log.warning("%s has %d characters, as published it has %d", root / name, len(characters), CHARACTERS[name])
    return drawings


def _files(root: Path, name: str) -> dict[str, bytes]:
    """Return path -> content of the folder ``root/name``, or else of ``root/name.zip``."""
    folder, archive = root / name, root / f"{name}.zip"
    if folder.is_dir():
        found = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}
    if not archive.exists():
        raise FileNotFoundError(
            f"expected the folder {folder} or the file {archive}, found neither: put the published {name}.zip there, "
            "or point root at the folder that holds it" + (" (download=True fetches it)" if name in _FULL else "")
        )
    try:
        with zipfile.ZipFile(archive) as file:
            inside = [n for n in file.namelist() if not n.endswith("/") and not n.startswith("__MACOSX")]
            return {n: file.read(n) for n in inside}
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        with archive.open("rb") as raw:
            start = raw.read(64).lstrip().lower()
        web = start.startswith((b"<!doctype", b"<html", b"<?xml"))
        got = "a web page" if web else f"{archive.stat().st_size} bytes of something else, or a part of it"
        raise OSError(
            f"expected {archive} to be the published zip file, got {got} ({error}): delete it and download it again, "
            "as a raw file"
        ) from error


def _member(files: dict[str, bytes], name: str) -> bytes:
    if name not in files:
        raise ValueError(f"expected {name} in all_runs, it is not there: get all_runs.zip anew")
    return files[name]


def _decode_all(drawings: Sequence[Drawing], size: int) -> Tensor:
    """Return uint8 pictures ``[N, 1, size, size]``, ink 255; decoded, or from a cache keyed by all source bytes."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"expected image_size to be a positive integer, got {size!r}")
    pillow = need("PIL")
    digest = hashlib.sha256()
    for alphabet, character, png in drawings:
        digest.update(f"{alphabet}/{character} {len(png)}\n".encode() + png)
    key = {"recipe": 1, "source": digest.hexdigest(), "size": size, "pillow": pillow.__version__}

    def build() -> dict[str, Any]:
        return {"images": torch.stack([_decode(d, size) for d in progress(drawings, "reading Omniglot")]).unsqueeze(1)}

    return cached("omniglot", json.dumps(key, sort_keys=True), build)["images"]


def _decode(drawing: Drawing, size: int) -> Tensor:
    numpy, image = need("numpy"), need("PIL.Image")
    alphabet, character, png = drawing
    try:
        # "L" first: a one-bit picture would be resized without antialiasing
        picture = image.open(io.BytesIO(png)).convert("L")
    except (OSError, SyntaxError) as error:
        raise OSError(
            f"expected a PNG picture in {alphabet}/{character}, got {len(png)} bytes of something else: {error}"
        ) from error
    if picture.size != (size, size):
        picture = picture.resize((size, size), image.Resampling.LANCZOS)
    return torch.from_numpy(255 - numpy.asarray(picture))
