"""Checkpoints that survive whatever happens while they are written.

A checkpoint is written under another name in the same folder, flushed to the disk, and only then given its name; the
one before it is kept. So a kill, a full disk or a power cut leaves at least one that can be read. They hold tensors and
plain values only and are read with ``weights_only=True``: reading one cannot run code.
"""

from __future__ import annotations

import errno
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from .errors import first_line

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written, or belongs to another run; the message says what to do."""


def save(payload: dict[str, Any], path: Path, *, keep_previous: bool = False) -> None:
    """Write a checkpoint so that at every moment ``path`` holds the old one or the new one, whole.

    Args:
        payload: tensors and plain values in dicts, lists and tuples.
        path: file to write; its folder exists.
        keep_previous: rename the checkpoint that ``path`` held to ``<stem>.prev<suffix>``, see `previous`.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; the old checkpoint is as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            torch.save({"format": FORMAT, **payload}, file)
            file.flush()
            os.fsync(file.fileno())
        if keep_previous and path.exists():
            # a second name for the old file; at no moment is there none
            spare = path.with_name(f".{path.name}.previous")
            spare.unlink(missing_ok=True)
            _link(path, spare)
            os.replace(spare, previous(path))
        os.replace(partial, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch's zip writer turns a failed write into a RuntimeError
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot save {path}: {_reason(error, path.parent)}; {_what_is_left(path)}. "
            "Make room (or make the folder writable) and continue with resume=true"
        ) from error


def load(path: Path, *, map_location: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: the file is cut short or damaged, holds something else, or was written by a newer metasam.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not look at the checksums of tensors
        if damaged:
            raise ValueError(f"the checksum of {damaged} is wrong")
        payload = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is cut short, damaged or no checkpoint: {first_line(error)[:100]}") from error
    if not isinstance(payload, dict) or "format" not in payload:
        raise CheckpointError(f"{path} is no checkpoint of metasam: expected a dict with the key 'format'")
    if payload["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {payload['format']}; expected {FORMAT}: read it with the version that wrote it"
        )
    return payload


def load_latest(path: Path, *, map_location: torch.device | str = "cpu") -> tuple[dict[str, Any], str | None]:
    """Read ``path``, or the one before it if that cannot be read.

    Returns:
        The checkpoint, and a sentence to show if it is the previous one.

    Raises:
        FileNotFoundError: there is neither.
        CheckpointError: what there is cannot be read.
    """
    try:
        return load(path, map_location=map_location), None
    except (CheckpointError, FileNotFoundError) as error:
        before = previous(path)
        if not before.exists():
            raise
        try:
            payload = load(before, map_location=map_location)
        except CheckpointError as second:
            raise CheckpointError(f"{error}; and the one before it: {second}") from error
        problem = f"{path} is missing" if isinstance(error, FileNotFoundError) else str(error)
        return payload, f"{problem}; continuing from {before.name}"


def previous(path: Path) -> Path:
    """Where the checkpoint before ``path`` is kept.

    >>> previous(Path("checkpoint.pt")).name
    'checkpoint.prev.pt'
    """
    return path.with_name(f"{path.stem}.prev{path.suffix}")


def exists(path: Path) -> bool:
    """Whether there is a checkpoint, or one before it."""
    return path.exists() or previous(path).exists()


def write_text(path: Path, text: str) -> None:
    """Write a small file so that it holds the old text or the new, whole."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {path}: {_reason(error, path.parent)}") from error


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links: between the two renames there is only the previous one
        os.replace(source, target)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _reason(error: BaseException, folder: Path) -> str:
    """What went wrong, in words."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            full = seen.errno in (errno.ENOSPC, errno.EDQUOT)
            return f"no space is left on the disk that holds {folder}" if full else os.strerror(seen.errno).lower()
        seen = seen.__cause__ or seen.__context__
    return first_line(error)


def _what_is_left(path: Path) -> str:
    if path.exists():
        return f"the checkpoint saved before it is intact in {path.name}"
    return "no checkpoint had been saved before it"
