"""Errors in words."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    r"""What an error of others says first, or its type where it says nothing.

    >>> first_line(RuntimeError("\nno memory\nat line 3")), first_line(KeyboardInterrupt())
    ('no memory', 'KeyboardInterrupt')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
