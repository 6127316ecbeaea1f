"""Results that take seconds to make, kept as files in the user's cache folder and believed only after a check."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def cache_folder() -> Path:
    """Return ``$METASAM_CACHE``, else ``$XDG_CACHE_HOME/metasam``, else ``~/.cache/metasam``; it need not exist."""
    if own := os.environ.get("METASAM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "metasam"


def cached(name: str, key: str, build: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return ``build()``, a dict of tensors and plain values, or the copy of it that an earlier call kept.

    A file is a JSON line (name, key, SHA-256 of the rest), then what ``torch.save`` writes. Anything unexpected in it,
    truncation included, means building afresh. It is written under a temporary name and renamed, so no other process
    sees half of it. A folder that cannot be read or written only costs the cache.

    Args:
        name: what it is; the start of the file name.
        key: everything that the result depends on, versions and source hashes included.
        build: makes the result.
    """
    try:
        path = cache_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.cache"
    except RuntimeError as error:  # there is no home folder
        _log.warning("no cache for %s: %s; set METASAM_CACHE to a folder", name, error)
        return build()
    with contextlib.suppress(OSError, ValueError):
        header, _, payload = path.read_bytes().partition(b"\n")
        if json.loads(header) == _header(name, key, payload):
            return torch.load(io.BytesIO(payload), weights_only=True)
    result = build()
    buffer = io.BytesIO()
    torch.save(result, buffer)
    payload = buffer.getvalue()
    try:
        _write(path, json.dumps(_header(name, key, payload)).encode() + b"\n" + payload)
    except OSError as error:
        _log.warning(
            "cannot keep %s (%s): it is made again next time; set METASAM_CACHE to a writable folder", name, error
        )
    return result


def _header(name: str, key: str, payload: bytes) -> dict[str, str]:
    return {"name": name, "key": key, "sha256": hashlib.sha256(payload).hexdigest()}


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def need(module: str, extra: str = "cli") -> ModuleType:
    """Import an optional dependency.

    Raises:
        ImportError: it is not installed; the message names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'this needs {module.split(".")[0]}: pip install "metasam[{extra}]"') from error


def progress(items: Sequence[_T], what: str) -> Iterable[_T]:
    """Iterate with a progress bar on stderr, if that is a terminal and rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    console = Console(stderr=True)
    return track(items, description=what, console=console, transient=True) if console.is_terminal else items
