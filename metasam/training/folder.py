"""A run's folder: made, held by one process, and given its files whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..checkpoint import CheckpointError
from ..configure import Config, plain


def make(folder: Path, key: str = "run") -> None:
    """Make the folder, which ``key`` of the config names, if it is not there.

    Raises:
        CheckpointError: it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else error
        raise CheckpointError(
            f"cannot write to the {key} folder {folder}: {reason}; choose another with {key}=DIR"
        ) from error


@contextmanager
def alone(folder: Path, key: str = "run") -> Iterator[None]:
    """Within: no other process trains in this folder, which ``key`` of the config names.

    The lock goes with the process, however that ends.

    Raises:
        CheckpointError: another process does.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another process is training in {folder}: wait for it, or choose another folder with {key}=DIR"
            ) from None
        except OSError:  # a file system that knows no locks
            pass
        yield
    finally:
        os.close(handle)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write results to read, whole or not at all; ``per_task`` stays on one line."""
    lines = [f"  {json.dumps(k)}: {_json(k, v)}" for k, v in values.items()]
    checkpoint.write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _without_nan(value: Any) -> Any:
    """The value with null for numbers that JSON does not know."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    return [_without_nan(v) for v in value] if isinstance(value, list | tuple) else value


def _json(key: str, value: Any) -> str:
    if key == "per_task":
        return json.dumps([_without_nan(round(v, 6)) for v in value])
    return json.dumps(_without_nan(value), indent=2, allow_nan=False).replace("\n", "\n  ")


def to_yaml(config: Config) -> str:
    """The config as text."""
    try:
        import yaml
    except ImportError:
        return json.dumps(plain(config), indent=2) + "\n"  # which is YAML as well
    return str(yaml.safe_dump(plain(config), sort_keys=False, default_flow_style=False))
