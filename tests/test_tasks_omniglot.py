"""Omniglot loaders on tiny files in the published layouts, and on the published files beside the project, if there."""

import hashlib
import io
import json
import logging
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from metasam.tasks import (
    Omniglot,
    OmniglotOneShot,
    TaskFamily,
    modified_hausdorff_nearest_neighbour,
    pixel_nearest_neighbour,
)
from metasam.tasks import omniglot as module
from metasam.tasks.baselines import modified_hausdorff
from metasam.types import Task

Image = pytest.importorskip("PIL.Image")

DATA = Path(__file__).parents[2] / "shared/data/omniglot"
published = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the published files in {DATA}")
SMALL1 = ("Balinese", "Early_Aramaic", "Greek", "Korean", "Latin")
SMALL2 = ("Greek", "Japanese_(katakana)", "Latin", "Sanskrit", "Tagalog")
EPISODE = {"ways": 2, "shots": 1, "queries": 1}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("METASAM_CACHE", str(tmp_path_factory.mktemp("cache")))


def picture(text, size=30):
    """A one-bit picture as published, ink 0 on paper 1, of a pattern that its text decides."""
    bits = bytes(255 * (byte & 1) for byte in hashlib.shake_256(text.encode()).digest(size * size))
    buffer = io.BytesIO()
    Image.frombytes("L", (size, size), bits).convert("1").save(buffer, "PNG")
    return buffer.getvalue()


def characters(alphabets, each=3, drawings=3):
    return {
        f"{alphabet}/character{c:02}/{c:04}_{d:02}.png": picture(f"{alphabet} {c} {d}")
        for alphabet in alphabets
        for c in range(1, each + 1)
        for d in range(1, drawings + 1)
    }


def write(root, name, files, zipped):
    if zipped:
        with zipfile.ZipFile(root / f"{name}.zip", "w") as archive:
            archive.writestr(f"{name}/", "")
            for path, content in files.items():
                archive.writestr(f"{name}/{path}", content)
            archive.writestr(f"__MACOSX/{name}/._x.png", b"resource fork")
    else:
        for path, content in files.items():
            (root / name / path).parent.mkdir(parents=True, exist_ok=True)
            (root / name / path).write_bytes(content)


@pytest.fixture(params=["folder", "zip"])
def minimal(request, tmp_path):
    for name, alphabets in (("images_background_small1", SMALL1), ("images_background_small2", SMALL2)):
        write(tmp_path, name, characters(alphabets), request.param == "zip")
    return tmp_path


@pytest.fixture(params=["omniglot-py", "."])
def complete(request, tmp_path):
    base = tmp_path / request.param
    base.mkdir(exist_ok=True)
    write(base, "images_background", characters([f"Back{i:02}" for i in range(12)]), False)
    write(base, "images_evaluation", characters([f"Eval{i}" for i in range(4)]), False)
    return tmp_path


def counts(family):
    return {split: facts["classes"] for split, facts in family.describe()["splits"].items()}


def pixels(family, split):
    return {image.numpy().tobytes() for image in family._images[split]}


def check_disjoint(family):
    splits = list(counts(family))
    for i, a in enumerate(splits):
        for b in splits[:i]:
            assert not set(family.class_names(a)) & set(family.class_names(b))
            assert not pixels(family, a) & pixels(family, b)


@pytest.mark.parametrize(
    ("protocol", "options", "expected"),
    [
        ("minimal1", {}, {"train": SMALL1, "validation": ("Japanese_(katakana)", "Sanskrit", "Tagalog")}),
        ("minimal2", {}, {"train": SMALL2, "validation": ("Balinese", "Early_Aramaic", "Korean")}),
        (
            "minimal",
            {},
            {
                "train": ("Greek", "Japanese_(katakana)", "Korean", "Latin"),
                "validation": ("Early_Aramaic",),
                "test": ("Balinese", "Sanskrit", "Tagalog"),
            },
        ),
        (
            "minimal",
            {"holdout": False},
            {
                "train": ("Early_Aramaic", "Greek", "Japanese_(katakana)", "Korean", "Latin"),
                "test": ("Balinese", "Sanskrit", "Tagalog"),
            },
        ),
    ],
)
def test_minimal_protocols(minimal, protocol, options, expected):
    family = Omniglot(minimal, protocol, **options, **EPISODE)
    assert {split: tuple(family.alphabets(split)) for split in counts(family)} == expected
    assert counts(family) == {split: 3 * len(alphabets) for split, alphabets in expected.items()}
    check_disjoint(family)
    assert isinstance(family, TaskFamily)
    assert not family.rotations
    json.dumps(family.describe())
    for absent in {"train", "validation", "test"} - set(expected):
        with pytest.raises(ValueError, match="omniglot_oneshot" if absent == "test" else "holdout=True"):
            family.batch(absent, [0])


def test_minimal1_without_small2_has_no_validation(minimal):
    for path in minimal.glob("*small2*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    family = Omniglot(minimal, "minimal1", **EPISODE)
    with pytest.raises(ValueError, match=r"its alphabets are in images_background_small2.zip"):
        family.size("validation")
    with pytest.raises(FileNotFoundError, match=r"images_background_small2.zip, found neither: put the published"):
        Omniglot(minimal, "minimal", **EPISODE)


def test_minimal_from_the_complete_set(tmp_path):
    write(tmp_path, "images_background", characters({*SMALL1, *SMALL2, "Futurama"}), True)
    assert counts(Omniglot(tmp_path, "minimal", **EPISODE)) == {"train": 12, "validation": 3, "test": 9}


def test_an_alphabet_that_lacks_is_named(tmp_path):
    write(tmp_path, "images_background_small1", characters(SMALL1[:-1]), True)
    with pytest.raises(ValueError, match="'minimal1' needs the alphabets Latin for train"):
        Omniglot(tmp_path, "minimal1", **EPISODE)


def test_background_and_evaluation(complete):
    family = Omniglot(complete, "background/evaluation", **EPISODE)
    assert family.alphabets("validation") == ["Back05", "Back11"]
    assert len(family.alphabets("train")) == 10
    assert family.alphabets("test") == ["Eval0", "Eval1", "Eval2", "Eval3"]
    check_disjoint(family)


def test_random_split(tmp_path, monkeypatch):
    names = [f"Alphabet{i % 50:02}/character{i // 50:02}" for i in range(1623)]
    parts = module._random(names, seed=0, validation=100)
    assert {split: len(members) for split, members in parts.items()} == {"train": 1100, "validation": 100, "test": 423}
    assert len(set().union(*parts.values())) == 1623
    assert parts == module._random(names, seed=0, validation=100)
    assert parts["test"] == module._random(names, seed=0, validation=0)["test"]
    assert parts["test"] != module._random(names, seed=1, validation=100)["test"]
    write(tmp_path, "images_background", characters(["A"]), True)
    write(tmp_path, "images_evaluation", characters(["B"]), True)
    with pytest.raises(ValueError, match=r"more than 1200 characters and validation_classes in 0..1199, got 6"):
        Omniglot(tmp_path, **EPISODE)
    monkeypatch.setattr(module, "_random", lambda names, *_: {"train": names[:4], "test": names[4:]})
    family = Omniglot(tmp_path, **EPISODE)
    assert family.rotations
    assert family._sampler("train")(range(100)).classes.max() == 15
    with pytest.raises(ValueError, match="set validation_classes"):
        family.size("validation")


def test_vinyals_is_read_from_its_lists_or_refused(complete):
    with pytest.raises(
        FileNotFoundError, match=r"published lists.*train.txt, .*val.txt, .*test.txt.*use split='random'"
    ):
        Omniglot(complete, "vinyals", **EPISODE)
    base = complete / "omniglot-py" if (complete / "omniglot-py").exists() else complete
    folder = base / "splits" / "vinyals"
    folder.mkdir(parents=True)
    lists = {
        "train": ["Back00/character01", "Back01/character02"],
        "val": ["Back00/character02", "Eval0/character01"],
        "test": ["Eval1/character01", "Eval1/character02"],
    }
    for name, members in lists.items():
        lines = [f"{member}/rot{r:03}" for member in members for r in (0, 90, 180, 270)]
        (folder / f"{name}.txt").write_text("\n".join(lines))
    family = Omniglot(complete, "vinyals", **EPISODE)
    assert family.class_names("validation") == lists["val"]
    assert counts(family) == {"train": 2, "validation": 2, "test": 2}
    check_disjoint(family)
    (folder / "test.txt").write_text("Eval1/character01\nEval9/character01")
    with pytest.raises(ValueError, match="'test' names 1 characters that the data lacks, first 'Eval9/character01'"):
        Omniglot(complete, "vinyals", **EPISODE)
    (folder / "test.txt").write_text("Eval1/character01\nBack00/character01")
    with pytest.raises(ValueError, match="class 'Back00/character01' is in both 'train' and 'test'"):
        Omniglot(complete, "vinyals", **EPISODE)


def test_download_asks_torchvision_for_both_sets(tmp_path, monkeypatch):
    asked = []

    class Fake:
        def __init__(self, root, background, download):
            asked.append((root, background, download))
            name = "images_background" if background else "images_evaluation"
            (Path(root) / "omniglot-py").mkdir(exist_ok=True)
            write(Path(root) / "omniglot-py", name, characters(["A", "B"] if background else ["C"]), False)

    real = module.need
    fake = type("datasets", (), {"Omniglot": Fake})
    monkeypatch.setattr(module, "need", lambda name, *extra: fake if "torchvision" in name else real(name, *extra))
    with pytest.raises(FileNotFoundError, match="download=True fetches it"):
        Omniglot(tmp_path, "background/evaluation", **EPISODE)
    assert not asked
    family = Omniglot(tmp_path, "background/evaluation", download=True, **EPISODE)
    assert asked == [(str(tmp_path), True, True), (str(tmp_path), False, True)]
    assert counts(family) == {"train": 3, "validation": 3, "test": 3}


def test_pictures_are_inverted_and_reduced_with_antialiasing(minimal):
    family = Omniglot(minimal, "minimal1", image_size=30, **EPISODE)
    original = Image.open(io.BytesIO(picture("Balinese 1 1"))).convert("L")
    first = family._images["train"][0, 0]
    assert torch.equal(first == 255, torch.tensor(list(original.tobytes())).view(30, 30) == 0)
    assert first.unique().tolist() == [0, 255]
    small = Omniglot(minimal, "minimal1", image_size=10, **EPISODE)._images["train"]
    assert small.shape == (45, 1, 10, 10)
    assert len(small.unique()) > 50


def test_cache_follows_the_content(tmp_path):
    write(tmp_path, "images_background_small1", characters(SMALL1), False)
    before = Omniglot(tmp_path, "minimal1", **EPISODE)._images["train"]
    (file,) = (tmp_path / "images_background_small1/Balinese/character01").glob("*_01.png")
    file.write_bytes(picture("another drawing"))
    after = Omniglot(tmp_path, "minimal1", **EPISODE)._images["train"]
    assert (before != after).flatten(1).any(1).nonzero().flatten().tolist() == [0]


def test_damaged_files_are_named_and_left_alone(tmp_path):
    archive = tmp_path / "images_background_small1.zip"
    with pytest.raises(FileNotFoundError, match="found neither"):
        Omniglot(tmp_path, "minimal1")
    write(tmp_path, archive.stem, characters(SMALL1), True)
    good = archive.read_bytes()
    damaged = bytearray(good)
    start = good.index(b"IDAT")
    damaged[start + 8 : start + 40] = bytes(32)
    cases = {
        b"<!DOCTYPE html><html>Sign in</html>": "got a web page",
        good[:-200]: "bytes of something else, or a part of it",
        b"": "got 0 bytes",
        bytes(damaged): "Bad CRC",
    }
    for content, message in cases.items():
        archive.write_bytes(content)
        with pytest.raises(OSError, match=rf"small1.zip to be the published zip file.*{message}"):
            Omniglot(tmp_path, "minimal1", **EPISODE)
        assert archive.read_bytes() == content
    write(tmp_path, archive.stem, {"readme.txt": b"nothing else"}, True)
    with pytest.raises(OSError, match="found none"):
        Omniglot(tmp_path, "minimal1", **EPISODE)
    write(tmp_path, archive.stem, characters(SMALL1) | {"Greek/character01/0001_01.png": b"no picture"}, True)
    with pytest.raises(OSError, match="PNG picture in Greek/character01, got 10 bytes"):
        Omniglot(tmp_path, "minimal1", **EPISODE)


def test_a_copy_of_another_size_than_published_is_reported(minimal, caplog):
    with caplog.at_level(logging.WARNING):
        Omniglot(minimal, "minimal1", **EPISODE)
    assert "has 15 characters, as published it has 136" in caplog.text


def test_wrong_arguments(minimal):
    with pytest.raises(ValueError, match=r"split to be one of 'vinyals', 'random'.* got 'lake'"):
        Omniglot(minimal, "lake")
    with pytest.raises(ValueError, match="20-way episodes need 20 classes, split 'train' has 15"):
        Omniglot(minimal, "minimal1", ways=20)
    with pytest.raises(ValueError, match="class 'Balinese/character01' of split 'train' has 3 images"):
        Omniglot(minimal, "minimal1")
    with pytest.raises(ValueError, match="image_size to be a positive integer, got 0"):
        Omniglot(minimal, "minimal1", image_size=0)


def runs(mark="", break_labels=False):
    files = {}
    for r in range(1, 21):
        order = [(7 * q + r) % 20 + 1 for q in range(20)]
        for w in range(1, 21):
            files[f"run{r:02}/training/class{w:02}.png"] = picture(f"{r} {w}")
        for q, w in enumerate(order, 1):
            files[f"run{r:02}/test/item{q:02}.png"] = picture(f"{r} {w}")
        lines = [f"run{r:02}/test/item{q:02}.png run{r:02}/training/class{w:02}.png" for q, w in enumerate(order, 1)]
        files[f"run{r:02}/class_labels.txt"] = "\n".join(lines[:-1] if break_labels else lines).encode()
    return files


@pytest.mark.parametrize("layout", ["folder", "zip", "flat zip"])
def test_one_shot_runs(tmp_path, layout):
    if layout == "flat zip":  # as published
        with zipfile.ZipFile(tmp_path / "all_runs.zip", "w") as archive:
            for path, content in runs().items():
                archive.writestr(path, content)
    else:
        write(tmp_path, "all_runs", runs(), layout == "zip")
    family = OmniglotOneShot(tmp_path, image_size=30)
    assert isinstance(family, TaskFamily)
    assert family.size("test") == 20
    assert family.output_size == 20
    task = family.batch("test", [19, 0])
    assert task.support[0].shape == task.query[0].shape == (2, 20, 1, 30, 30)
    assert task.support[1].tolist() == [list(range(20))] * 2
    assert task.query[1][1].tolist() == [(7 * q + 1) % 20 for q in range(20)]
    # query drawings are copies of the support here, so any distance finds all of them
    assert pixel_nearest_neighbour(task).tolist() == [1, 1]
    assert modified_hausdorff_nearest_neighbour(task).tolist() == [1, 1]
    assert json.dumps(family.describe())
    with pytest.raises(ValueError, match=r"task numbers 0 to 19, got .20."):
        family.batch("test", [20])
    with pytest.raises(ValueError, match="no 'train' split, only 'test'"):
        family.batch("train", [0])


def test_broken_runs_are_refused(tmp_path):
    write(tmp_path, "all_runs", runs(break_labels=True), True)
    with pytest.raises(ValueError, match=r"run01/class_labels.txt to give each item a class"):
        OmniglotOneShot(tmp_path)
    files = runs()
    del files["run07/test/item03.png"]
    write(tmp_path, "all_runs", files, True)
    with pytest.raises(ValueError, match=r"run07/test/item03.png in all_runs"):
        OmniglotOneShot(tmp_path)


def test_modified_hausdorff_by_its_definition():
    a, b = torch.rand(7, 2, dtype=torch.float64), torch.rand(9, 2, dtype=torch.float64)
    pairs = torch.tensor([[((p - q) ** 2).sum() ** 0.5 for q in b] for p in a], dtype=torch.float64)
    expected = max(pairs.min(1).values.mean(), pairs.min(0).values.mean())
    assert torch.allclose(modified_hausdorff(a, b), expected, rtol=1e-9)
    assert modified_hausdorff(a, a) < 1e-6
    blank = torch.zeros(1, 2, 1, 4, 4)
    with pytest.raises(ValueError, match="found a blank one"):
        modified_hausdorff_nearest_neighbour(Task((blank, torch.zeros(1, 2).long()), (blank, torch.zeros(1, 2).long())))


@published
@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        ("minimal1", {"train": 136, "validation": 106}),
        ("minimal2", {"train": 156, "validation": 86}),
        ("minimal", {"train": 137, "validation": 22, "test": 83}),
    ],
)
def test_published_minimal_sets(protocol, expected, caplog):
    family = Omniglot(DATA, protocol, ways=20, shots=5, queries=15)
    assert counts(family) == expected
    assert not caplog.text
    check_disjoint(family)
    ink = family._images["train"].double().div(255).mean()
    assert 0.05 < ink < 0.2


@published
def test_both_minimal_sets_hold_the_same_greek_and_latin():
    one, two = ({d for d in module._read(DATA, name) if d[0] in ("Greek", "Latin")} for name in module._SMALL)
    assert one == two
    assert len(one) == 50 * 20


@published
def test_published_baselines():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of small products: more threads only wait for each other
    try:
        task = OmniglotOneShot(DATA, image_size=105).batch("test", range(20))
        error = 1 - modified_hausdorff_nearest_neighbour(task).mean()
    finally:
        torch.set_num_threads(threads)
    assert abs(error - 0.388) < 0.001  # Lake et al. report 38.8 %; 155 of 400
    pixels = 1 - pixel_nearest_neighbour(OmniglotOneShot(DATA).batch("test", range(20))).mean()
    assert abs(pixels - 0.79) < 0.02
