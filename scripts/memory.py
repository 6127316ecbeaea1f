"""What a command may ask of its process, and a library may not: how memory is kept."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # numbers of glibc's mallopt


def keep_freed_memory() -> bool:
    """Let the C allocator keep what is freed, as a step needs it again at once; returns whether it was asked.

    By default glibc gives tensors of some megabytes back to the system and takes fresh pages for the next ones, which
    can cost a quarter of the time of a meta-step. Does nothing where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = {_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: 1 << 30, _TOP_PAD: 1 << 26}
    taken = [mallopt(option, value) for option, value in settings.items()]
    return all(taken)
