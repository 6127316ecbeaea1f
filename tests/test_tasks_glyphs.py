"""The embedded data set: legible, varied, without a test outline in training; and its cache."""

import json
import logging
import unicodedata
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from metasam.tasks import Glyphs, pixel_nearest_neighbour
from metasam.tasks import cache as cache_module
from metasam.tasks import glyphs as glyphs_module
from metasam.tasks.cache import cache_folder, cached, need

pytest.importorskip("PIL")
matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METASAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Glyphs(seed=3)


def pictures(family, split):
    """Pictures by class ``[n, 20, 28, 28]``."""
    return family._images[split].view(-1, 20, 28, 28)


def test_enough_letters_of_unseen_scripts(family):
    counts = {split: facts["classes"] for split, facts in family.describe()["splits"].items()}
    assert counts["train"] >= 500
    assert counts["validation"] >= 50
    assert counts["test"] >= 100
    scripts = {s: set(glyphs_module.SCRIPTS[s]) for s in counts}
    for split in counts:
        assert all(name.startswith(tuple(scripts[split])) for name in family.class_names(split))
    assert not scripts["train"] & scripts["test"]
    assert not scripts["train"] & scripts["validation"]
    json.dumps(family.describe())


def test_every_picture_has_ink_away_from_the_border(family):
    for split in ("train", "validation", "test"):
        images = pictures(family, split).flatten(0, 1).double() / 255
        ink = images.mean((1, 2))
        assert ink.min() > 0.01
        assert ink.max() < 0.6
        frame = torch.ones(28, 28, dtype=torch.bool)
        frame[1:-1, 1:-1] = False
        assert images[:, frame].mean() < 0.01
        rows = (images.sum(2) * torch.arange(28)).sum(1) / images.sum((1, 2))
        columns = (images.sum(1) * torch.arange(28)).sum(1) / images.sum((1, 2))
        assert abs(rows.mean() - 13.5) < 1
        assert abs(columns.mean() - 13.5) < 1


def test_drawers_differ_and_letters_stay_recognisable(family):
    images = pictures(family, "test").flatten(2).float()
    same = [torch.pdist(letter).min() for letter in images]
    assert min(same) > 100  # a single pixel turned over is 255
    accuracy = pixel_nearest_neighbour(family.batch("test", range(200))).mean()
    assert 0.5 < accuracy < 0.8  # chance is 0.2, and a data set that pixels solve teaches nothing


def test_no_picture_is_in_two_splits(family):
    seen = {}
    for split in ("train", "validation", "test"):
        for image in pictures(family, split).flatten(0, 1):
            assert seen.setdefault(image.numpy().tobytes(), split) == split


def test_no_test_outline_is_in_training(family):
    """Of the masters, at another resolution and by another measure than the one that chose them."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    faces = [folder / f"{name}.ttf" for name in ("DejaVuSans", "DejaVuSerif", "STIXGeneral")]
    masters = glyphs_module.masters(faces)

    def outlines(split):
        letters = [unicodedata.lookup(name) for name in family.class_names(split)]
        return torch.stack([m for letter in letters for m in masters.get(letter, [])]).gt(127).flatten(1).float()

    def overlap(a, b):  # the ink that two outlines share, of the ink that either has
        both = a @ b.T
        return both / (a.sum(1, keepdim=True) + b.sum(1) - both)

    train, validation, test = (outlines(split) for split in ("train", "validation", "test"))
    everything = torch.stack([m for faces in masters.values() for m in faces]).gt(127).flatten(1).float()
    assert overlap(test, everything).gt(0.9).sum() > len(test)  # there were copies to be left out: each is its own only
    assert overlap(test, train).max() < 0.85
    assert overlap(validation, train).max() < 0.85
    assert overlap(test, validation).max() < 0.85


def test_masters_are_upright_letters():
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    found = glyphs_module.masters([folder / "DejaVuSans.ttf"])
    (low,) = found["L"]
    assert F.avg_pool2d(low.float()[None], 28)[0].argmin() == 1  # an L has its ink left and below
    assert "\u00c4" not in found  # accented
    assert "\u4e00" not in found  # not in the font


def test_drawing_is_deterministic_and_keyed(family):
    master = torch.zeros(3, 56, 56, dtype=torch.uint8)
    master[:, 10:46, 24:32] = 255
    keys = torch.tensor([4, 5, 4])
    drawn = glyphs_module.draw(master, keys)
    assert torch.equal(drawn, glyphs_module.draw(master, keys))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    # the seed is that of the episodes alone
    assert torch.equal(family._images["test"], Glyphs(seed=9)._images["test"])


def file_of(folder):
    (file,) = folder.glob("*.cache")
    return file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("METASAM_CACHE", str(tmp_path / "deep" / "folder"))
    return tmp_path / "deep" / "folder"


def builder():
    calls = []

    def build():
        calls.append(1)
        return {"images": torch.arange(1000), "names": ["a"]}

    return calls, build


def test_cache_is_used_and_checked(folder):
    calls, build = builder()
    assert cached("x", "key", build)["names"] == cached("x", "key", build)["names"] == ["a"]
    assert len(calls) == 1
    file = file_of(folder)
    good = file.read_bytes()
    flipped = bytearray(good)
    flipped[-500] ^= 1
    for bad in (good[: len(good) // 2], bytes(flipped), b"", b"<html>", good.replace(b'"key": "key"', b'"key": "old"')):
        file.write_bytes(bad)
        calls.clear()
        assert torch.equal(cached("x", "key", build)["images"], torch.arange(1000))
        assert len(calls) == 1
        assert file.read_bytes() == good
    assert [f.name for f in folder.iterdir()] == [file.name]  # nothing unfinished stays behind
    cached("x", "other key", build)
    assert len(calls) == 2


def test_unwritable_cache_only_costs_the_cache(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("METASAM_CACHE", str(tmp_path / "file"))
    _, build = builder()
    with caplog.at_level(logging.WARNING):
        assert len(cached("x", "key", build)["images"]) == 1000
    assert "METASAM_CACHE" in caplog.text


def test_a_failed_write_leaves_nothing(folder, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(cache_module.os, "replace", full)
    _, build = builder()
    assert cached("x", "key", build)["names"] == ["a"]
    assert list(folder.iterdir()) == []


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("METASAM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("METASAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "metasam"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "metasam"


def test_a_missing_extra_is_named():
    with pytest.raises(ImportError, match=r'needs no_such_module: pip install "metasam\[cli\]"'):
        need("no_such_module")
