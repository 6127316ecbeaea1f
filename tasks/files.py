"""Labelled images and arrays of one's own: folders of image files, and ``.npz`` files."""

from __future__ import annotations

import logging
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metasam.tasks.cache import need, progress
from metasam.tasks.streams import Examples, checked

_log = logging.getLogger(__name__)

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""What the parts of a data set are called, in any case."""
_INPUTS, _LABELS = ("images", "x"), ("labels", "y")

Files = list[tuple[Path, str]]
"""Image files, each with the name of its class."""


def folder_files(root: Path) -> tuple[list[str], dict[str, Files]]:
    """Return the classes of a folder of images, sorted, and split -> its files, sorted.

    Raises:
        FileNotFoundError: there is no folder, or it holds no images in the layout.
        ValueError: a split has a class that the training images lack, two folders name the same split, or there is none
            for training.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"expected a folder {root}, which is not there: set tasks.root=DIR to your images")
    splits: dict[str, Path] = {}
    for folder in _folders(root):
        split = _split_name(folder)
        if split in splits:
            raise ValueError(
                f"expected one folder for {split}, got {splits[split].name} and {folder.name} in {root}: "
                "keep one of them"
            )
        if split:
            splits[split] = folder
    if splits and not ("train" in splits and _folders(splits["train"])):
        named = ", ".join(f.name for f in splits.values())
        raise ValueError(
            f"expected {root}/train/<class>/*.png beside the other parts, got {named} and no classes in a folder "
            "train: add them; if these are classes, rename their folders, as parts of a data set are called so"
        )
    splits = splits or {"train": root}
    files = {split: _class_files(folder) for split, folder in splits.items()}
    names = sorted({name for _, name in files["train"]})
    empty = [f.name for f in _folders(splits["train"]) if f.name not in names]
    if names and empty:
        _log.warning("no images in %s of %s: these are no classes", ", ".join(empty), splits["train"])
    for split, found in files.items():
        if not found:
            raise FileNotFoundError(
                f"expected images as <class>/*.png in {splits[split]}, found none: set tasks.root=DIR to the folder "
                f"that holds the folders of the classes; image files end in {', '.join(SUFFIXES)}"
            )
        if unknown := sorted({name for _, name in found} - set(names)):
            raise ValueError(
                f"the class {unknown[0]!r} of {splits[split]} has no images in {splits['train']}: add some, or "
                "remove the class"
            )
    return names, files


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _split_name(folder: Path) -> str | None:
    return _SPLIT_NAMES.get(folder.name.lower())


def _class_files(root: Path) -> Files:
    return [
        (path, folder.name)
        for folder in _folders(root)
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
    ]


def read_folder(files: Files, names: Sequence[str], size: int, color: bool) -> Examples:
    """Return uint8 images ``[N, 3 or 1, size, size]`` and their labels.

    Raises:
        OSError: a file is not an image of 8 bits a channel; the message names it.
    """
    images = torch.stack([_read_image(path, size, color) for path, _ in progress(files, "reading images")])
    number = {name: c for c, name in enumerate(names)}
    return images, torch.tensor([number[name] for _, name in files])


def _read_image(path: Path, size: int, color: bool) -> Tensor:
    numpy, image, ops = need("numpy"), need("PIL.Image"), need("PIL.ImageOps")
    try:
        with image.open(path) as file:
            if file.mode.startswith(("I", "F")):
                raise OSError(f"its mode is {file.mode}")
            picture = ops.exif_transpose(file).convert("RGB" if color else "L")
    except (OSError, SyntaxError, ValueError, EOFError, zlib.error, image.DecompressionBombError) as error:
        raise OSError(
            f"expected an image of 8 bits a channel in {path}, cannot read it ({error}): repair or remove the file"
        ) from error
    pixels = torch.from_numpy(numpy.array(ops.fit(picture, (size, size), image.Resampling.LANCZOS)))
    return pixels.permute(2, 0, 1) if color else pixels.unsqueeze(0)


def read_npz(path: Path) -> dict[str, Examples]:
    """Return the splits of a ``.npz`` file: inputs uint8 or float32 ``[N, C, H, W]`` or ``[N, F]``, and labels.

    Raises:
        FileNotFoundError: the file is not there.
        ValueError: it is not a ``.npz`` file with inputs and labels, or it holds Python objects.
    """
    numpy = need("numpy")
    if not path.is_file():
        raise FileNotFoundError(f"expected a file {path}, which is not there: set tasks.path=FILE.npz to your arrays")
    arrays: dict[tuple[str, str], Any] = {}
    try:
        # opened here, as numpy leaves a broken file open
        with path.open("rb") as raw:
            loaded = numpy.load(raw, allow_pickle=False)
            if not hasattr(loaded, "files"):
                raise ValueError("it holds one array alone")
            present = list(loaded.files)
            for key in present:
                place = _place(key)
                if place and place in arrays:
                    raise ValueError(f"it has two arrays for the {place[1]} of {place[0]}, one is {key}")
                if place:
                    arrays[place] = loaded[key]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error) and zipfile.is_zipfile(path):
            raise ValueError(
                f"{path} holds Python objects, which can run any code and are refused: save arrays of numbers, with "
                "numpy.savez_compressed(path, images=..., labels=...)"
            ) from error
        raise ValueError(
            f"expected {path} to be a .npz file, cannot read it ({error}): write it with "
            "numpy.savez_compressed(path, images=..., labels=...)"
        ) from error
    splits = {split for split, _ in arrays}
    lacking = [
        f"{kind} of {split}" for split in sorted(splits | {"train"}) for kind in ("inputs", "labels")
        if (split, kind) not in arrays
    ]  # fmt: skip
    if lacking:
        raise ValueError(
            f"expected arrays images and labels (or x and y, with _train, _val or _test) in {path}, got "
            f"{', '.join(present) or 'none'} without {lacking[0]}: write it with "
            "numpy.savez_compressed(path, images=..., labels=...)"
        )
    return {
        split: checked(
            split, _inputs(split, arrays[split, "inputs"], path), _labels(split, arrays[split, "labels"], path)
        )
        for split in ("train", "validation", "test")
        if split in splits
    }


def _place(key: str) -> tuple[str, str] | None:
    """The split and kind of an array, from its name: ``x_test`` or ``test_images``.

    >>> _place("val_labels"), _place("x"), _place("weights")
    (('validation', 'labels'), ('train', 'inputs'), None)
    """
    words = key.lower().split("_")
    kinds = [w for w in words if w in _INPUTS + _LABELS]
    splits = [_SPLIT_NAMES[w] for w in words if w in _SPLIT_NAMES]
    if len(kinds) != 1 or len(kinds) + len(splits) != len(words) or len(words) > 2:
        return None
    return (splits or ["train"])[0], "inputs" if kinds[0] in _INPUTS else "labels"


def _inputs(split: str, array: Any, path: Path) -> Tensor:
    numbers = array.dtype.kind == "f" or array.dtype == "uint8"
    if not numbers or array.ndim not in (2, 3, 4):
        raise ValueError(
            f"expected the {split} inputs of {path} as uint8 or float, images [N, H, W], [N, C, H, W] or [N, H, W, C] "
            f"or features [N, F]; got {array.dtype} {list(array.shape)}: convert them, for instance with .astype"
        )
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[1] not in (1, 3, 4):
        if array.shape[3] not in (1, 3, 4):
            raise ValueError(
                f"expected 1, 3 or 4 channels in the {split} images of {path}, second or last; got {list(array.shape)}"
            )
        array = array.transpose(0, 3, 1, 2)
    if array.dtype.kind == "f":
        array = array.astype("float32")
    return torch.tensor(array)


def _labels(split: str, array: Any, path: Path) -> Tensor:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"expected the {split} labels of {path} as integers [N], got {array.dtype} {list(array.shape)}: "
            "number the classes from 0 on"
        )
    return torch.tensor(array.astype("int64"))
