"""Supervised data: streams against a plain loop, exact noise, disjoint parts, and what each source refuses."""

import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from metasam.configure import locate, parameters
from metasam.tasks import Supervised, supervised
from metasam.tasks.augment import crop_flip
from metasam.tasks.counter import bits, task_keys
from metasam.tasks.labels import CIFAR10_CONFUSIONS, apportion, share, spoil, take
from metasam.tasks.supervised import cifar, digits, image_folder, npz

pytest.importorskip("sklearn")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

SPLITS = ("train", "validation", "test")


def numbered(n=100, **options):
    """A data set whose inputs are the numbers of its examples, in all three splits together."""
    x, y = torch.arange(n + 20.0).view(-1, 1, 1, 1), torch.arange(n + 20) % 5
    parts = [(x[part], y[part]) for part in (slice(n), slice(n, n + 10), slice(n + 10, None))]
    return Supervised(*parts, **{"batch_size": 16, "seed": 3, **options})


def drawn(data, steps, side="support"):
    return [getattr(data.batch(i), side)[0].flatten().long().tolist() for i in steps]


@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_the_stream_is_what_a_plain_loop_makes(holdout):
    data = numbered(holdout=holdout)
    kept = [int(v) for x, _ in data.examples("train") for v in x.flatten()]
    query = sorted(set(range(100)) - set(kept)) if holdout else kept
    assert len(kept) == (80 if holdout else 100)
    loops = {"support": (kept, 16, 0x73747201), "query": (query, 4, 0x73747202)}
    for side, (pool, size, stream) in loops.items():
        expected = []
        for epoch in range(4):
            words = bits(task_keys(3, stream, [epoch])[0], len(pool)).tolist()
            order = [x for _, x in sorted(zip(words, pool, strict=True))]
            expected += [order[k * size : (k + 1) * size] for k in range(len(pool) // size)]
        count = min(len(expected), 15)
        assert drawn(data, range(count), side) == expected[:count]
    for i in (0, 7):
        for x, y in (data.batch(i).support, data.batch(i).query):
            assert torch.equal(x.flatten().long() % 5, y)


def test_steps_in_any_order_and_any_process():
    code = """
import torch
from metasam.tasks.supervised import digits
data = digits(per_class=20, noise=0.3, holdout=0.1, augment="crop_flip", batch_size=16, seed=5)
weigh = lambda t: float((t.double().flatten() * torch.arange(t.numel())).sum())
print([data.batch(i).map(weigh) for i in (9, 2)])
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout != ""
    data, other = (digits(per_class=20, augment="crop_flip", batch_size=16, seed=5) for _ in range(2))
    forward = [data.batch(i) for i in range(30)]
    backward = [other.batch(i) for i in reversed(range(30))][::-1]
    for a, b in zip(forward, backward, strict=True):
        assert torch.equal(a.support[0], b.support[0])
        assert torch.equal(a.query[0], b.query[0])
    changed = digits(per_class=20, augment="crop_flip", batch_size=16, seed=6)
    assert not torch.equal(changed.batch(0).support[0], forward[0].support[0])


def test_facts_are_json():
    assert json.loads(json.dumps(digits(holdout=0.1).describe()))["sizes"] == {
        "train": 720, "validation": 200, "test": 797, "holdout": 80,
    }  # fmt: skip


def everything(data, split):
    x, y = zip(*data.examples(split, batch_size=7), strict=True)
    return torch.cat(x), torch.cat(y)


def rows(x):
    return {row.numpy().tobytes() for row in x}


# -- streams ---------------------------------------------------------------------------------------------------------


def test_an_epoch_visits_each_example_once_and_drops_the_rest():
    data = numbered()  # 100 examples, 16 at a time
    assert data.steps_per_epoch == 6
    epochs = [drawn(data, range(6 * e, 6 * e + 6)) for e in range(5)]
    for epoch in epochs:
        seen = [x for batch in epoch for x in batch]
        assert len(seen) == len(set(seen)) == 96
        assert set(seen) <= set(range(100))
    assert len({tuple(epoch[0]) for epoch in epochs}) == 5
    assert {x for epoch in epochs for batch in epoch for x in batch} == set(range(100))


def test_without_holdout_the_query_is_drawn_from_training_in_an_order_of_its_own():
    data = numbered()
    assert data.val_batch_size == 4
    query = [x for batch in drawn(data, range(25), "query") for x in batch]
    assert sorted(query) == list(range(100))
    support = [x for batch in drawn(data, range(6)) for x in batch]
    assert query[: len(support)] != support


def test_held_out_examples_are_never_trained_on():
    data = numbered(holdout=0.3)
    trained = {x for batch in drawn(data, range(40)) for x in batch}
    queried = {x for batch in drawn(data, range(40), "query") for x in batch}
    assert len(trained) == data.size("train") == 70
    assert len(queried) == 30
    assert not trained & queried
    assert torch.tensor(sorted(queried)).remainder(5).bincount().tolist() == [6] * 5  # stratified
    assert rows(everything(data, "train")[0]) == rows(torch.tensor(sorted(trained)).float().view(-1, 1, 1, 1))
    whole = data.without_holdout()
    assert (whole.size("train"), whole.describe()["sizes"]["holdout"]) == (100, 0)
    assert drawn(whole, range(9)) == drawn(numbered(), range(9))
    assert data.size("train") == 70  # left as it was


def test_holdout_takes_no_class_away():
    with pytest.raises(ValueError, match=r"holdout=0\.5 takes all 1 training examples of class \d, .*smaller holdout"):
        digits(per_class=1, holdout=0.5)
    data = digits(per_class=2, holdout=0.1)  # two of twenty
    assert everything(data, "train")[1].unique().numel() == 10
    assert data.describe()["query_classes"] == 2
    assert digits(per_class=2).describe()["query_classes"] == 10


def test_data_are_scaled_like_others():
    x, y = torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8), torch.arange(40) % 2
    data = Supervised(*3 * [(x, y)], batch_size=8, mean=0.5, std=0.1)
    mean, std = torch.tensor([0.2, 0.4, 0.6]).view(3, 1, 1), torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
    other = data.scaled_like(mean, std)
    assert torch.allclose(everything(other, "test")[0], (x / 255 - mean) / std, atol=1e-5)
    assert torch.allclose(everything(data, "test")[0], (x / 255 - 0.5) / 0.1, atol=1e-5)  # left as it was
    assert torch.allclose(everything(other.scaled_like(None, None), "test")[0], x / 255)
    assert torch.equal(other.mean, mean.double())
    with pytest.raises(ValueError, match="broadcast against an input"):
        data.scaled_like(torch.zeros(5), torch.ones(5))


def test_validation_and_test_are_in_no_batch():
    for holdout in (0.0, 0.25):
        data = digits(holdout=holdout, batch_size=50, noise=0.5)
        seen = [rows(everything(data, split)[0]) for split in SPLITS]
        seen[0] = set().union(
            *(rows(pair[0]) for i in range(40) for t in [data.batch(i)] for pair in (t.support, t.query))
        )
        assert [len(s) for s in seen] == [800, 200, 797]  # of 1,797 different images
        assert len(set().union(*seen)) == 1797


def test_a_set_smaller_than_a_batch_is_a_batch():
    data = numbered(batch_size=1000)
    assert (data.batch_size, data.val_batch_size, data.steps_per_epoch) == (100, 25, 1)
    assert data.describe()["batch_is_whole_set"]
    assert sorted(drawn(data, [4])[0]) == list(range(100))
    assert not numbered().describe()["batch_is_whole_set"]
    tiny = numbered(n=10, holdout=0.1, batch_size=9, val_fraction=1.0)  # one held-out example, nine asked for
    assert (tiny.batch_size, tiny.val_batch_size) == (9, 1)


def test_images_are_scaled_as_torch_would():
    x = torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8)
    y = torch.arange(40) % 2
    mean, std = torch.tensor([0.2, 0.4, 0.6]).view(3, 1, 1), torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
    kept = x.clone()
    for options, expected in (({}, x / 255), ({"mean": mean, "std": std}, (x / 255 - mean) / std)):
        data = Supervised((x, y), (x[:5], y[:5]), (x[5:], y[5:]), batch_size=8, **options)
        for split, part in (("train", expected), ("validation", expected[:5]), ("test", expected[5:])):
            got, labels = everything(data, split)
            assert got.dtype == torch.float32
            assert labels.dtype == torch.int64
            assert torch.allclose(got, part, atol=1e-5)
        support = data.batch(3).support
        assert all(any(torch.allclose(one, e, atol=1e-5) for e in expected) for one in support[0])
    assert torch.equal(x, kept)
    floats = Supervised(*3 * [(x.double(), y)], batch_size=40)
    floats.batch(0).support[0].zero_()
    next(floats.examples("train"))[0].zero_()  # a consumer may write into what it got
    assert torch.equal(everything(floats, "train")[0], x.float())


def test_crop_and_flip_against_a_plain_loop():
    images = torch.randint(1, 256, (200, 2, 16, 8), dtype=torch.uint8)
    changed = crop_flip(images, torch.tensor(5))
    assert changed.dtype == torch.uint8
    seen = set()
    for image, got in zip(images, changed, strict=True):
        padded = torch.nn.functional.pad(image, (1, 1, 2, 2))
        options = {
            (dy, dx, flip): crop.flip(-1) if flip else crop
            for dy in range(5)
            for dx in range(3)
            for crop in [padded[:, dy : dy + 16, dx : dx + 8]]
            for flip in (False, True)
        }
        fits = [k for k, option in options.items() if torch.equal(option, got)]
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) == 30  # every shift, flipped and not
    assert torch.equal(changed, crop_flip(images, torch.tensor(5)))
    assert not torch.equal(changed, crop_flip(images, torch.tensor(6)))


def test_augmentation_changes_training_and_query_batches_only():
    plain, changed = digits(batch_size=32), digits(batch_size=32, augment="crop_flip")
    for split in SPLITS:
        for a, b in zip(everything(plain, split), everything(changed, split), strict=True):
            assert torch.equal(a, b)
    for i in (0, 5):
        a, b = plain.batch(i), changed.batch(i)
        assert torch.equal(a.support[1], b.support[1])
        for one, other in ((a.support[0], b.support[0]), (a.query[0], b.query[0])):
            assert (one != other).flatten(1).any(1).float().mean() > 0.5
    one = torch.arange(1, 257.0).view(1, 1, 16, 16), torch.zeros(1).long()
    for side in ("support", "query"):  # the same image at every step, changed by step and seed

        def steps(seed, side=side):
            data = Supervised(one, one, one, seed=seed, augment="crop_flip")
            return [getattr(data.batch(i), side)[0].numpy().tobytes() for i in range(30)]

        assert len(set(steps(0))) > 15
        assert steps(0) == steps(0) != steps(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size to be an integer >= 1, got 0"),
        ({"seed": -1}, "seed"),
        ({"holdout": 1.0}, r"holdout to be 0 \(none\) or a share below 1, got holdout=1.0"),
        ({"holdout": 0.001}, "holdout=0.001 takes 0 of 100 training examples"),
        ({"val_fraction": 0}, "val_fraction above 0 and at most 1, got val_fraction=0"),
        ({"augment": "crop"}, "augment to be one of crop_flip or null, got 'crop'"),
        ({"classes": 4}, "labels below classes=4, got the label 4"),
        ({"std": 0.0}, "finite mean and std > 0"),
        ({"mean": torch.zeros(1, 100, 1, 1, 1)}, r"broadcast against an input \[1, 1, 1\]"),
    ],
)
def test_what_a_stream_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        numbered(**options)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ((torch.zeros(4, 2), torch.zeros(4)), r"train labels as integers \[N\] from 0 on, got torch.float32"),
        ((torch.zeros(4, 2), torch.tensor([0, 1, -1, 0])), "from 0 on"),
        ((torch.zeros(4, 2), torch.zeros(3).long()), "one label for each of 4 train inputs, got 3"),
        ((torch.zeros(0, 2), torch.zeros(0).long()), "at least one train example, got none"),
        ((torch.zeros(4, 3), torch.zeros(4).long()), "one shape in all splits"),
        ((torch.zeros(4, 2).long(), torch.zeros(4).long()), "uint8 or float .* got torch.int64"),
        ((torch.tensor([[0.0, 0], [1, torch.nan]]), torch.zeros(2).long()), "number 1 holds NaN"),
    ],
)
def test_what_a_stream_refuses_of_data(train, message):
    other = torch.zeros(4, 2), torch.zeros(4).long()
    with pytest.raises(ValueError, match=message):
        Supervised(train, other, other)


def test_what_a_stream_refuses_to_give():
    data = numbered()
    with pytest.raises(ValueError, match="step to be an integer >= 0, got -1"):
        data.batch(-1)
    with pytest.raises(ValueError, match="expected a split out of 'train', 'validation', 'test', got 'val'"):
        data.examples("val")
    with pytest.raises(ValueError, match="got 'val'"):
        data.size("val")
    with pytest.raises(ValueError, match="augment=crop_flip is for images"):
        Supervised(*3 * [(torch.zeros(4, 2), torch.zeros(4).long())], augment="crop_flip")


# -- labels ----------------------------------------------------------------------------------------------------------


def test_parts_of_labels_are_exact():
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 7)[torch.randperm(87)]
    sizes = labels.bincount()
    for total in (0, 1, 10, 44, 86, 87):
        counts = apportion(sizes, total)
        assert counts.sum() == total
        assert ((counts - sizes * total / 87).abs() < 1).all()
        assert torch.equal(labels[share(labels, total, torch.tensor(3))].bincount(minlength=3), counts)
    small, large = (take(labels, torch.tensor([n, n, n]), torch.tensor(3)) for n in (3, 6))
    assert (small <= large).all()
    assert not torch.equal(small, take(labels, torch.tensor([3, 3, 3]), torch.tensor(4)))


@pytest.mark.parametrize("noise", [0.1, 0.37, 0.8, 1.0])
def test_symmetric_noise(noise):
    clean = torch.arange(4007) % 10
    got = spoil(clean, 10, noise, torch.tensor(9))
    wrong = got != clean
    assert wrong.sum() == round(noise * 4007)
    each = clean[wrong].bincount(minlength=10)
    assert (each - noise * clean.bincount()).abs().max() < 1
    offsets = ((got - clean) % 10)[wrong].bincount(minlength=10)
    assert offsets[0] == 0
    expected = wrong.sum() / 9
    chi2 = ((offsets[1:] - expected) ** 2 / expected).sum()
    assert chi2 < 26.1  # 8 degrees of freedom, one in a thousand
    assert torch.equal(clean, torch.arange(4007) % 10)
    assert not torch.equal(got, spoil(clean, 10, noise, torch.tensor(8)))


def test_asymmetric_noise():
    clean = torch.arange(1000) % 10
    got = spoil(clean, 10, 0.4, torch.tensor(1), "asymmetric")
    assert torch.equal((clean[got != clean]).bincount(), torch.full((10,), 40))
    assert torch.equal(got[got != clean], (clean[got != clean] + 1) % 10)
    got = spoil(clean, 10, 0.4, torch.tensor(1), "asymmetric", CIFAR10_CONFUSIONS)
    pairs = torch.stack([clean, got], 1)[got != clean].unique(dim=0, return_counts=True)
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    assert {(names[a], names[b]): int(n) for (a, b), n in zip(*pairs, strict=True)} == {
        ("truck", "automobile"): 40, ("bird", "airplane"): 40, ("deer", "horse"): 40, ("cat", "dog"): 40,
        ("dog", "cat"): 40,
    }  # fmt: skip
    few = spoil(clean % 4, 4, 0.4, torch.tensor(1), "asymmetric", CIFAR10_CONFUSIONS)
    assert few[few != clean % 4].unique().tolist() == [0]  # of four classes only bird -> airplane is there
    with pytest.raises(ValueError, match="classes to confuse, got none of them: set noise_kind=symmetric"):
        spoil(clean % 2, 2, 0.4, torch.tensor(1), "asymmetric", CIFAR10_CONFUSIONS)
    with pytest.raises(ValueError, match="at least 2 classes"):
        spoil(clean * 0, 1, 0.4, torch.tensor(1))


# -- sources ---------------------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns_and_all_seeds_share_the_test():
    published = pytest.importorskip("sklearn.datasets").load_digits()
    label = {(i / 16).astype("float32").tobytes(): t for i, t in zip(published.images, published.target, strict=True)}
    one, other = digits(seed=1, per_class=10), digits(seed=2, per_class=10)
    for split in SPLITS:
        x, y = everything(one, split)
        assert [label[image.numpy().tobytes()] for image in x] == y.tolist()
    for split in ("validation", "test"):
        assert torch.equal(everything(one, split)[0], everything(other, split)[0])
    assert everything(one, "test")[1].bincount().tolist() == apportion(
        torch.as_tensor(published.target).bincount(), 797
    ).tolist()  # fmt: skip
    assert rows(everything(one, "train")[0]) != rows(everything(other, "train")[0])
    whole = rows(everything(digits(), "train")[0])
    for seed in range(3):
        assert rows(everything(digits(seed=seed, per_class=10), "train")[0]) < whole
    moved = digits(split_seed=1)
    assert rows(everything(moved, "test")[0]) != rows(everything(one, "test")[0])


def test_limited_data_is_nested_and_exact():
    sets = [rows(everything(digits(seed=3, per_class=n), "train")[0]) for n in (1, 5, 20)]
    assert [len(s) for s in sets] == [10, 50, 200]
    assert sets[0] < sets[1] < sets[2]
    assert everything(digits(seed=3, per_class=5), "train")[1].bincount().tolist() == [5] * 10
    third = digits(fraction=0.3)
    assert third.size("train") == 240
    counts = everything(third, "train")[1].bincount()
    assert ((counts - 0.3 * everything(digits(), "train")[1].bincount()).abs() < 1).all()


def test_noise_is_on_training_labels_alone():
    clean, noisy = digits(per_class=40, seed=4), digits(per_class=40, seed=4, noise=0.25)
    for split in SPLITS:
        (x, y), (same, labels) = everything(clean, split), everything(noisy, split)
        assert torch.equal(x, same)
        assert (y != labels).sum() == (100 if split == "train" else 0)
    facts = noisy.describe()
    assert (facts["noise"], facts["noise_kind"], facts["wrong_labels"]) == (0.25, "symmetric", 100)
    assert clean.describe()["noise_kind"] is None
    wrong = [
        everything(digits(seed=seed, noise=0.25), "train")[1] != everything(digits(), "train")[1] for seed in (1, 2)
    ]
    assert wrong[0].sum() == wrong[1].sum() == 200
    assert not torch.equal(*wrong)
    # held-out labels are as noisy: those trained on and those held out have all the wrong ones between them
    held = digits(per_class=40, seed=4, noise=0.25, holdout=0.5, batch_size=10)

    def labelled(x, y):
        return {(row.numpy().tobytes(), int(c)) for row, c in zip(x, y, strict=True)}

    true = labelled(*everything(clean, "train"))
    trained = labelled(*everything(held, "train"))
    queried = set().union(*(labelled(*held.batch(i).query) for i in range(200)))
    assert (len(trained), len(queried)) == (200, 200)
    assert 0 < len(queried - true) < 100
    assert len((trained | queried) - true) == 100


def test_the_first_classes():
    data = digits(classes=3, batch_size=16)
    assert data.output_size == 3
    for split in SPLITS:
        assert everything(data, split)[1].unique().tolist() == [0, 1, 2]
    assert rows(everything(data, "test")[0]) < rows(everything(digits(), "test")[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_class": 90}, r"class \d of digits has \d+ training examples, per_class=90 needs 90: set per_class=7\d"),
        ({"per_class": 5, "fraction": 0.5}, "per_class or fraction, got per_class=5 and fraction=0.5: drop one"),
        ({"fraction": 1.5}, "fraction to be above 0 and at most 1, got fraction=1.5"),
        ({"fraction": 0.0001}, "fraction=0.0001 of 800 training examples is none"),
        ({"fraction": 0.006}, "class . of digits has no training example left.*set a larger fraction, or per_class=1"),
        ({"noise": 1.2}, "noise to be a number between 0 .* got noise=1.2"),
        ({"noise": 0.2, "noise_kind": "pair"}, "noise_kind to be one of symmetric, asymmetric, got noise_kind='pair'"),
        ({"classes": 11}, "classes to be at most 10, which digits has, got classes=11"),
        ({"classes": 1}, "classes to be an integer >= 2"),
        ({"test": 0}, "test to be a number of examples or a share .* got test=0"),
        ({"test": 12.5}, "got test=12.5"),
        ({"test": "many"}, "got test='many'"),
        ({"test": 1797}, "test=1797 takes 1797 of 1797 examples; expected 1 to 1796"),
        ({"test": 1700, "validation": 97}, "validation=97 takes 97 of 97 examples"),
        ({"test": 1795, "validation": 1}, "has no training example left, it needs 1: add some"),
        ({"split_seed": -1}, "split_seed"),
        ({"split_seed": 10**23}, r"split_seed to be below 2\*\*63"),
        ({"validation": 0.999}, "validation=0.999 of all 1797 examples is 1795, and 1000 are left; expected 1 to 999"),
        ({"validation": 0}, "the best weights are chosen by them, got validation=0.*accuracy_last"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_what_digits_refuse(options, message):
    with pytest.raises(ValueError, match=message):
        digits(**options)


def write_pickle(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture(params=["cifar10", "cifar100"])
def published(request, tmp_path, monkeypatch):
    """Small files in the published layout; torchvision is told their checksums."""
    sets = pytest.importorskip("torchvision.datasets")
    rng = np.random.default_rng(0)
    ten = request.param == "cifar10"
    classes, kind = (10, sets.CIFAR10) if ten else (100, sets.CIFAR100)
    folder = tmp_path / kind.base_folder
    images = []

    def batch(n):
        data = rng.integers(256, size=(n, 3072), dtype=np.uint8)
        labels = [i % classes for i in range(n)]
        images.append((data, labels))
        return {"data": data, "labels" if ten else "fine_labels": labels, "filenames": ["x.png"] * n}

    lists = {}
    for name in ("train_list", "test_list"):
        files = [file for file, _ in getattr(kind, name)]
        size = (2 if ten else 4) * classes
        lists[name] = [[file, write_pickle(folder / file, batch(size))] for file in files]
        monkeypatch.setattr(kind, name, lists[name])
    names = [f"class{c}" for c in range(classes)]
    md5 = write_pickle(folder / kind.meta["filename"], {kind.meta["key"]: names})
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": md5})
    return request.param, tmp_path, folder, images, classes


def test_cifar(published):
    name, root, _, images, classes = published
    data = cifar(root, name=name, validation=classes, batch_size=8)
    assert (data.output_size, data.input_shape) == (classes, (3, 32, 32))
    train = sum(len(labels) for _, labels in images[:-1])
    assert [data.size(split) for split in SPLITS] == [train - classes, classes, len(images[-1][1])]
    mean, std = {
        "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    }[name]
    x, y = everything(data, "test")
    expected = torch.tensor(images[-1][0]).view(-1, 3, 32, 32) / 255
    expected = (expected - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(x, expected, atol=1e-5)
    assert y.tolist() == images[-1][1]
    assert everything(data, "validation")[1].bincount().tolist() == [1] * classes
    seen = [rows(everything(data, split)[0]) for split in SPLITS]
    assert len(set().union(*seen)) == sum(map(len, seen))
    again = cifar(root, name=name, validation=classes, batch_size=8, seed=5)
    assert torch.equal(everything(again, "validation")[0], everything(data, "validation")[0])
    noisy = everything(cifar(root, name=name, validation=classes, noise=0.5, noise_kind="asymmetric"), "train")[1]
    clean = everything(data, "train")[1]
    moved = {int(a): int(b) for a, b in zip(clean, noisy, strict=True) if a != b}
    expected = CIFAR10_CONFUSIONS if name == "cifar10" else {c: (c + 1) % 100 for c in moved}
    assert moved == expected
    assert len(moved) >= 5
    assert data._data["train"][0].dtype == torch.uint8


def test_cifar_files_that_are_missing_or_changed(published, tmp_path):
    name, root, folder, *_ = published
    with pytest.raises(FileNotFoundError, match=r"expected the folder .*nowhere.* set tasks.root=DIR .*download=true"):
        cifar(tmp_path / "nowhere", name=name)
    with pytest.raises(ValueError, match="name to be one of cifar10, cifar100, got name='cifar'"):
        cifar(root, name="cifar")
    file = next(f for f in sorted(folder.iterdir()) if "test" in f.name)
    file.write_bytes(file.read_bytes() + b"more")
    with pytest.raises(OSError, match="to hold the published files, some are missing or changed"):
        cifar(root, name=name, validation=10)


def paint(path, value, size=(20, 16), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def test_flat_image_folder(tmp_path):
    for c, name in enumerate(("bee", "ant", "cow")):
        for i in range(10):
            paint(tmp_path / name / f"{i}.png", (10 * c, 20 + i, 0))
        (tmp_path / name / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    data = image_folder(tmp_path, image_size=8, validation=0.2, test=9, batch_size=4, standardize=False)
    assert (data.input_shape, data.output_size) == ((3, 8, 8), 3)
    assert [data.size(split) for split in SPLITS] == [15, 6, 9]
    assert data.describe()["class_names"] == ["ant", "bee", "cow"]
    assert data.describe()["taken_from_training"] == {"validation": 0.2, "test": 9}
    colors = set()
    for split in SPLITS:
        x, y = everything(data, split)
        first = (x[:, :, 0, 0] * 255).round().long()
        assert torch.equal(first[:, 0], torch.tensor([10, 0, 20])[y])  # the sorted names number the classes
        assert x.amax((2, 3)).equal(x.amin((2, 3)))
        colors |= {tuple(c) for c in first.tolist()}
    assert len(colors) == 30
    grey = image_folder(tmp_path, image_size=8, color=False)
    assert grey.input_shape == (1, 8, 8)
    scaled, _ = everything(image_folder(tmp_path, image_size=8), "train")
    assert torch.allclose(scaled.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(scaled.std((0, 2, 3), unbiased=False), torch.tensor([1.0, 1.0, 0.0]), atol=1e-4)


def test_folders_that_are_called_like_parts_are_no_classes(tmp_path, caplog):
    for place in ("a/val/x", "a/test/y", "b/Train", "b/test", "c/train", "c/plane"):
        for i in range(8):
            paint(tmp_path / place / f"{i}.png", (i, 0, 0))
    for root, names in {"a": "test, val", "b": "Train, test", "c": "train"}.items():
        with pytest.raises(ValueError, match=rf"train/<class>/\*\.png .*got {names} and no classes .* rename"):
            image_folder(tmp_path / root, image_size=8)
    for place in ("d/Train/x", "d/Train/y", "d/DEV/x", "d/Testing/y"):
        for i in range(4):
            paint(tmp_path / place / f"{i}.png", (i, 0, 0))
    (tmp_path / "d/Train/nothing").mkdir()
    data = image_folder(tmp_path / "d", image_size=8)
    assert [data.size(split) for split in SPLITS] == [8, 4, 4]
    assert data.describe()["class_names"] == ["x", "y"]
    assert "no images in nothing of" in caplog.text


@pytest.mark.parametrize("val", ["val", "validation", "valid", "dev", "Val"])
def test_divided_image_folder(tmp_path, val):
    for i, split in enumerate(("train", val, "test")):
        for name in ("a", "b"):
            for j in range(6 - i):
                paint(tmp_path / split / name / f"{j}.jpg", (40 * i, 0, 0))
    data = image_folder(tmp_path, image_size=8, standardize=False)
    assert [data.size(split) for split in SPLITS] == [12, 10, 8]
    for i, split in enumerate(SPLITS):
        assert (everything(data, split)[0][:, 0].mean() * 255).item() == pytest.approx(40 * i, abs=3)
    assert data.describe()["taken_from_training"] == {}
    for file in (tmp_path / "test").rglob("*.jpg"):
        file.unlink()
    for folder in [*(tmp_path / "test").iterdir(), tmp_path / "test"]:
        folder.rmdir()
    data = image_folder(tmp_path, image_size=8, test=0.5)
    assert [data.size(split) for split in SPLITS] == [6, 10, 6]


def test_images_are_cropped_about_their_centre(tmp_path):
    picture = Image.new("RGB", (30, 10), (0, 0, 0))
    picture.paste((255, 255, 255), (10, 0, 20, 10))
    for i in range(4):
        for name in "ab":
            (tmp_path / name).mkdir(exist_ok=True)
            picture.save(tmp_path / name / f"{i}.png")
    x, _ = everything(image_folder(tmp_path, image_size=10, standardize=False, test=2, validation=2), "train")
    assert (x == 1).all()


def test_images_stand_as_the_camera_was_held(tmp_path):
    picture = Image.new("L", (8, 8))
    picture.paste(255, (0, 0, 8, 4))  # light above, in the file
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    for i in range(4):
        for name in "ab":
            (tmp_path / name).mkdir(exist_ok=True)
            picture.save(tmp_path / name / f"{i}.png", exif=exif)
    x, _ = everything(image_folder(tmp_path, image_size=8, standardize=False, test=2, validation=2), "train")
    assert (x[:, :, 4:] == 1).all()
    assert (x[:, :, :4] == 0).all()


def test_image_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a folder .*nowhere.*set tasks.root=DIR"):
        image_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"expected images as <class>/\*.png .*found none"):
        image_folder(tmp_path)
    for name in "ab":
        for i in range(5):
            paint(tmp_path / "one" / name / f"{i}.png", (i, 0, 0))
            paint(tmp_path / "two" / "train" / name / f"{i}.png", (i, 0, 0))
    (tmp_path / "one/b/3.png").write_bytes(b"not a picture")
    with pytest.raises(OSError, match=r"one.b.3\.png, cannot read it .*repair or remove"):
        image_folder(tmp_path / "one")
    whole = (tmp_path / "one/b/2.png").read_bytes()
    (tmp_path / "one/b/3.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match=r"one.b.3\.png, cannot read it"):
        image_folder(tmp_path / "one")
    paint(tmp_path / "one/b/3.png", 5000, mode="I;16")
    with pytest.raises(OSError, match=r"8 bits a channel in .*3\.png.*mode is I;16"):
        image_folder(tmp_path / "one")
    paint(tmp_path / "two/val/c/1.png", (0, 0, 0))
    with pytest.raises(ValueError, match=r"the class 'c' of .*val has no images in .*train"):
        image_folder(tmp_path / "two")
    paint(tmp_path / "two/validation/a/1.png", (0, 0, 0))
    with pytest.raises(ValueError, match="one folder for validation, got val and validation"):
        image_folder(tmp_path / "two")


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        (("images", "labels"), [42, 6, 12]),
        (("x", "y"), [42, 6, 12]),
        (("x_train", "y_train", "x_test", "y_test"), [54, 6, 60]),
        (("train_images", "train_labels", "val_images", "val_labels", "test_images", "test_labels"), [60, 60, 60]),
        (("images_train", "labels_train", "images_validation", "labels_validation"), [48, 60, 12]),
    ],
)
def test_npz_names(tmp_path, keys, sizes):
    arrays = {k: (np.arange(60) % 3)[:, None] if "y" in k or "labels" in k else np.random.rand(60, 5) for k in keys}
    np.savez(tmp_path / "mine.npz", **arrays, comment=np.arange(3))
    data = npz(tmp_path / "mine.npz", batch_size=8)
    assert [data.size(split) for split in SPLITS] == sizes
    assert (data.input_shape, data.output_size, data.name) == ((5,), 3, "mine")
    x, _ = everything(data, "train")
    assert torch.allclose(x.mean(0), torch.zeros(5), atol=1e-5)
    assert torch.allclose(x.std(0, unbiased=False), torch.ones(5), atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((60, 9, 7), "uint8", (1, 9, 7)),
        ((60, 3, 9, 7), "uint8", (3, 9, 7)),
        ((60, 9, 7, 3), "uint8", (3, 9, 7)),
        ((60, 9, 7, 1), "float64", (1, 9, 7)),
        ((60, 4), "float16", (4,)),
    ],
)
def test_npz_shapes(tmp_path, shape, dtype, expected):
    x = (np.random.default_rng(0).random(shape) * 200).astype(dtype)
    np.savez_compressed(tmp_path / "a.npz", x=x, y=np.arange(60, dtype="uint8") % 2)
    data = npz(tmp_path / "a.npz", standardize=False, test=20, validation=10)
    assert data.input_shape == expected
    got, _ = everything(data, "test")
    original = x if x.ndim != 4 or x.shape[1] == 3 else x.transpose(0, 3, 1, 2)
    original = torch.tensor(np.ascontiguousarray(original).reshape(60, *expected)).double()
    original = original / (255 if dtype == "uint8" else 1)
    distance = (got.double().flatten(1)[:, None] - original.flatten(1)).abs().amax(2)
    assert (distance.amin(1) < 1e-5).all()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((6, 2, 2), "int64"), "y": np.zeros(6, int)}, r"uint8 or float.*got int64 \[6, 2, 2\]"),
        ({"x": np.zeros(6), "y": np.zeros(6, int)}, r"got float64 \[6\]"),
        ({"x": np.zeros((6, 5, 5, 5)), "y": np.zeros(6, int)}, r"1, 3 or 4 channels .* got \[6, 5, 5, 5\]"),
        ({"x": np.zeros((6, 2)), "y": np.zeros(6)}, r"labels of .* as integers \[N\], got float64 \[6\]"),
        ({"x": np.zeros((6, 2)), "y": np.array(list("abcdef"))}, "number the classes from 0 on"),
        ({"x": np.zeros((6, 2)), "y": np.zeros((6, 2), int)}, r"got int64 \[6, 2\]"),
        ({"x": np.zeros((6, 2)), "y": np.arange(-1, 5)}, "from 0 on"),
        ({"x": np.zeros((6, 2))}, "got x without labels of train"),
        ({"pixels": np.zeros((6, 2))}, "images and labels .* got pixels without inputs of train"),
        ({"x_test": np.zeros((6, 2)), "y_test": np.zeros(6, int)}, "without inputs of train"),
        ({"x": np.zeros((6, 2)), "images": np.zeros((6, 2)), "y": np.zeros(6, int)}, "two arrays for the inputs"),
        ({"x": np.array([{}] * 6), "y": np.zeros(6, int)}, "Python objects, which can run any code and are refused"),
        ({"x": np.zeros((6, 2)), "y": np.zeros(5, int)}, "one label for each of 6 .* got 5"),
    ],
)
def test_npz_files_that_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        npz(tmp_path / "a.npz", test=1, validation=1)


def test_what_is_no_npz_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a file .*a\.npz.*set tasks.path=FILE"):
        npz(tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(b"text")
    with pytest.raises(ValueError, match=r"to be a \.npz file, cannot read it .*savez_compressed"):
        npz(tmp_path / "a.npz")
    np.save(tmp_path / "b.npy", np.zeros((3, 2)))
    with pytest.raises(ValueError, match="holds one array alone"):
        npz(tmp_path / "b.npy")
    np.savez(tmp_path / "c.npz", x=np.random.rand(60, 50), y=np.zeros(60, int))
    (tmp_path / "c.npz").write_bytes((tmp_path / "c.npz").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"to be a \.npz file"):
        npz(tmp_path / "c.npz")


def test_sources_without_their_library(monkeypatch, tmp_path):
    for module, build, extra in (("sklearn", digits, "cli"), ("torchvision", lambda: cifar(tmp_path), "vision")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            patch.delitem(sys.modules, f"{module}.datasets", raising=False)
            with pytest.raises(ImportError, match=rf'needs {module}: pip install "metasam\[{extra}\]"'):
                build()


@pytest.mark.parametrize("name", ["digits", "cifar10", "cifar100", "folder", "npz"])
def test_a_file_of_the_command_line_lists_every_option(name):
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((Path(__file__).parents[1] / f"configs/tasks/{name}.yaml").read_text())
    node = config["tasks"]
    taken, _ = parameters(locate(node["_target_"]))
    assert node.keys() - {"_target_"} == taken.keys() - {"seed", "batch_size"}
    assert set(supervised.__all__) >= {node["_target_"].split(".")[-1]}
    assert config["variant"] is None
    assert config["batch_size"] > 0
