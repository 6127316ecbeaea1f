"""Checkpoints: whole or not at all, whatever happens while one is written or to the file afterwards."""

import errno
import os

import pytest
import torch

from metasam import checkpoint
from metasam.checkpoint import CheckpointError


def payload(value):
    return {"weights": torch.full((1000,), float(value)), "iteration": value, "config": {"a": [1, None, "x"]}}


@pytest.fixture
def path(tmp_path):
    checkpoint.save(payload(1), tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt"


def files(path):
    return sorted(p.name for p in path.parent.iterdir())


def test_round_trip_and_previous(path):
    checkpoint.save(payload(2), path, keep_previous=True)
    checkpoint.save(payload(3), path, keep_previous=True)
    loaded, warning = checkpoint.load_latest(path)
    assert warning is None
    assert loaded["iteration"] == 3
    assert torch.equal(loaded["weights"], payload(3)["weights"])
    assert loaded["config"] == {"a": [1, None, "x"]}
    assert checkpoint.load(checkpoint.previous(path))["iteration"] == 2
    assert files(path) == ["checkpoint.prev.pt", "checkpoint.pt"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["write", "sync"])
def test_full_disk_leaves_the_old_one(path, monkeypatch, code, where):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(torch, "save", fail) if where == "write" else monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match=r"no space is left .* saved before it is intact .*resume=true"):
        checkpoint.save(payload(2), path, keep_previous=True)
    assert checkpoint.load(path)["iteration"] == 1
    assert files(path) == ["checkpoint.pt"]


def test_full_disk_at_the_first_save(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(CheckpointError, match="no checkpoint had been saved before it"):
        checkpoint.save(payload(2), tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.99])
def test_cut_short(path, keep):
    checkpoint.save(payload(2), path, keep_previous=True)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt is cut short, damaged or no checkpoint"):
        checkpoint.load(path)
    loaded, warning = checkpoint.load_latest(path)
    assert loaded["iteration"] == 1
    assert "cut short" in warning
    assert "continuing from checkpoint.prev.pt" in warning
    checkpoint.previous(path).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt is cut .*and the one before it: .*prev\.pt"):
        checkpoint.load_latest(path)


def test_damaged_inside(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path)


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "expected a dict with the key 'format'"),
        ({"format": 99}, "has format 99; expected 1"),
        (Evil(), "no checkpoint"),
    ],
)
def test_other_files(tmp_path, content, message):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(tmp_path / "x.pt")


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        checkpoint.load_latest(tmp_path / "checkpoint.pt")
    assert not checkpoint.exists(tmp_path / "checkpoint.pt")


def test_killed_between_the_renames(path):
    checkpoint.save(payload(2), path, keep_previous=True)
    path.unlink()
    loaded, warning = checkpoint.load_latest(path)
    assert loaded["iteration"] == 1
    assert "is missing; continuing" in warning


def test_without_hard_links(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    checkpoint.save(payload(2), path, keep_previous=True)
    assert checkpoint.load(path)["iteration"] == 2
    assert checkpoint.load(checkpoint.previous(path))["iteration"] == 1


def test_text_is_whole_or_as_it_was(tmp_path, monkeypatch):
    target = tmp_path / "results.json"
    checkpoint.write_text(target, "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*results\.json: no space is left"):
        checkpoint.write_text(target, "new")
    assert target.read_text() == "old"
    assert files(target) == ["results.json"]
