import ctypes
import platform

import pytest

from metasam.scripts.memory import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc")
def test_glibc_takes_every_setting():
    assert keep_freed_memory()


def test_elsewhere_it_does_nothing(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
