"""Episodes: what a batch holds, and that it depends on nothing but (seed, split, number)."""

import os
import pickle
import subprocess
import sys

import pytest
import torch

from metasam.tasks import EpisodeSampler, ImageEpisodes, TaskFamily
from metasam.tasks.counter import bits, normal, task_keys, uniform
from metasam.tasks.episodes import _rows

WAYS, SHOTS, QUERIES = 5, 2, 3


def numbered(classes=12, each=8, channels=1, size=4):
    """Images whose first pixel is their label and second their number within the class."""
    labels = torch.arange(classes).repeat_interleave(each)
    images = torch.zeros(classes * each, channels, size, size, dtype=torch.uint8)
    images[:, :, 0, 0] = labels[:, None].to(torch.uint8)
    images[:, :, 0, 1] = torch.arange(each).repeat(classes)[:, None].to(torch.uint8)
    return images, labels


def family(**options):
    data = {split: numbered() for split in ("train", "validation", "test")}
    return ImageEpisodes(data, **{"ways": WAYS, "shots": SHOTS, "queries": QUERIES} | options)


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip((*a.support, *a.query), (*b.support, *b.query), strict=True))


def test_counter_is_splitmix64():
    def reference(state, count):
        mask, out = 2**64 - 1, []
        for _ in range(count):
            state = (state + 0x9E3779B97F4A7C15) & mask
            z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            out.append(z ^ (z >> 31))
        return out

    for seed in (0, 1234567, 2**62 + 12345):
        drawn = [word % 2**64 for word in bits(torch.tensor(seed), 100).tolist()]
        assert drawn == reference(seed, 100)
    assert bits(torch.tensor(1234567), 1).item() == 6457827717110365317  # the published first output of this seed


def test_uniform_and_normal_have_their_moments():
    keys = task_keys(3, 0, range(200))
    u, z = uniform(keys, 500), normal(keys, 500)
    assert u.min() >= 0
    assert u.max() < 1
    # five standard errors of 100,000 draws
    assert abs(u.mean() - 1 / 2) < 5 * 12**-0.5 / 316
    assert abs(z.mean()) < 5 / 316
    assert abs(z.var() - 1) < 5 * 2**0.5 / 316


def test_shapes_types_and_order():
    task = family().batch("train", [0, 7, 3])
    assert task.support[0].shape == (3, SHOTS * WAYS, 1, 4, 4)
    assert task.query[0].shape == (3, QUERIES * WAYS, 1, 4, 4)
    for x, y in (task.support, task.query):
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        # round by round, so that a shard of a set is balanced
        assert torch.equal(y, torch.arange(WAYS).repeat(3, y.shape[1] // WAYS))


def test_uint8_becomes_the_unit_interval_whatever_the_default_dtype():
    images = torch.full((12, 1, 2, 2), 255, dtype=torch.uint8)
    task = ImageEpisodes({"train": (images, torch.arange(12) % 3)}, ways=3, queries=1)
    torch.set_default_dtype(torch.float64)
    try:
        x = task.batch("train", [0]).support[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert x.dtype == torch.float32
    assert (x == 1).all()


def test_labels_name_classes_and_support_and_query_share_no_image():
    task = family().raw("train", range(300))
    (xs, ys), (xq, yq) = task.support, task.query
    for t in range(300):
        of_class = {}
        for x, y in [*zip(xs[t], ys[t].tolist(), strict=True), *zip(xq[t], yq[t].tolist(), strict=True)]:
            of_class.setdefault(y, []).append((int(x[0, 0, 0]), int(x[0, 0, 1])))
        assert len({cls for pictures in of_class.values() for cls, _ in pictures}) == WAYS
        for pictures in of_class.values():
            assert len({cls for cls, _ in pictures}) == 1
            assert len(set(pictures)) == SHOTS + QUERIES


@pytest.mark.parametrize("rotations", [False, True])
def test_every_row_layout_gathers_the_images_of_the_index(rotations):
    # 1x4x4 bytes go eight at a time, 3x5x5 do not divide, a channels-last view is not contiguous, floats are no bytes
    whole = torch.randint(256, (60, 1, 4, 4), dtype=torch.uint8)
    odd = torch.randint(256, (60, 3, 5, 5), dtype=torch.uint8)
    layouts = [whole, whole[1:], odd, odd.to(memory_format=torch.channels_last), odd.float(), whole.double()]
    for images in layouts:
        assert _rows(images).data_ptr() == images.data_ptr()
        labels = torch.arange(len(images)) % 6
        source = ImageEpisodes({"train": (images, labels)}, ways=4, shots=2, queries=3, rotations=rotations)
        classes, support, query = source._sampler("train")(range(20))
        raw = source.raw("train", range(20))
        for index, (x, _) in ((support, raw.support), (query, raw.query)):
            expected = images[index]
            if rotations:
                for t in range(20):
                    for w in range(4):
                        turned = expected[t, :, w].rot90(int(classes[t, w]) % 4, (-2, -1))
                        expected[t, :, w] = turned
            assert torch.equal(x, expected.flatten(1, 2))


def test_rotations_are_new_training_classes_only():
    source = family(rotations=True)
    classes = source._sampler("train")(range(2000)).classes
    assert classes.unique().tolist() == list(range(48))
    assert source._sampler("test")(range(200)).classes.max() == 11
    # a class may meet its own rotation, under another label
    assert any(len(set((row // 4).tolist())) < WAYS for row in classes)


def test_a_task_depends_on_seed_split_and_number_alone():
    source = family()
    together = source.batch("test", range(20))
    for number, alone in enumerate(together.unbind()):
        assert equal(alone, source.batch("test", [number]).unbind()[0])
    assert equal(together, pickle.loads(pickle.dumps(source)).batch("test", torch.arange(20)))
    shuffled = source.batch("test", [5, 1, 5])
    assert equal(shuffled.unbind()[0], shuffled.unbind()[2])
    assert equal(shuffled.unbind()[1], together.unbind()[1])
    for other in (family(seed=1).batch("test", range(20)), source.batch("validation", range(20))):
        assert not any(equal(a, b) for a, b in zip(together.unbind(), other.unbind(), strict=True))


def test_another_process_and_hash_seed_draw_the_same():
    code = (
        "from metasam.tasks import EpisodeSampler;"
        "s = EpisodeSampler([range(9 * c, 9 * c + 9) for c in range(30)], 5, 2, 3, seed=11, split='test');"
        "print([p.tolist() for p in s([0, 3, 10**12])])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    sampler = EpisodeSampler([range(9 * c, 9 * c + 9) for c in range(30)], 5, 2, 3, seed=11, split="test")
    assert runs == {f"{[part.tolist() for part in sampler([0, 3, 10**12])]}\n"}


def chi_square(counts):
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


def test_classes_labels_and_images_are_uniform():
    classes, each, tasks = 10, 6, 6000
    sampler = EpisodeSampler([range(each * c, each * c + each) for c in range(classes)], 4, 1, 2, seed=5)
    picked, support, query = sampler(range(tasks))
    joint = torch.zeros(classes, 4)
    for w in range(4):
        joint[:, w] = torch.bincount(picked[:, w], minlength=classes)
    # 39 or fewer degrees of freedom: chi-square passes 73 once in a thousand; a fixed labelling gives thousands
    assert chi_square(joint) < 73
    assert chi_square(torch.bincount(support.flatten() % each, minlength=each).float()) < 21
    assert chi_square(torch.bincount(query.flatten() % each, minlength=each).float()) < 21
    fixed = picked.sort(1).values
    assert chi_square(torch.stack([torch.bincount(fixed[:, w], minlength=classes) for w in range(4)]).float()) > 1000


def test_two_labellings_of_a_class_pair_are_equally_frequent():
    picked = EpisodeSampler([range(4), range(4), range(4)], 2, 1, 1, seed=2)(range(6000)).classes
    pairs = torch.bincount(picked[:, 0] * 3 + picked[:, 1], minlength=9).view(3, 3)
    assert pairs.diagonal().sum() == 0
    assert chi_square(pairs[~torch.eye(3, dtype=torch.bool)].float()) < 21  # five degrees of freedom, one in a thousand


def test_ragged_pools_stay_inside_each_class():
    pools = [[10, 11, 12], list(range(20, 60)), [70, 71, 72, 73]]
    classes, support, query = EpisodeSampler(pools, 3, 1, 2)(range(500))
    for t in range(500):
        for w in range(3):
            drawn = [*support[t, :, w].tolist(), *query[t, :, w].tolist()]
            assert set(drawn) <= set(pools[classes[t, w]])
            assert len(set(drawn)) == 3


def test_sampling_touches_no_image(tmp_path):
    file = tmp_path / "images"
    images = torch.from_file(str(file), shared=True, size=60 * 16, dtype=torch.uint8).view(60, 1, 4, 4)
    source = ImageEpisodes({"train": (images, torch.arange(60) % 6)}, queries=2)
    assert source._images["train"].data_ptr() == images.data_ptr()  # the memory map itself, not a copy of it
    before = source._sampler("train")(range(8))
    images.fill_(7)
    assert all(torch.equal(a, b) for a, b in zip(before, source._sampler("train")(range(8)), strict=True))
    assert (source.raw("train", range(8)).query[0] == 7).all()


def test_read_only_numpy_memory_maps_are_taken_as_they_are(tmp_path):
    np = pytest.importorskip("numpy")
    np.save(tmp_path / "images.npy", numbered()[0].numpy())
    images = np.load(tmp_path / "images.npy", mmap_mode="r")
    labels = numbered()[1].numpy().astype(np.int32)
    mapped = ImageEpisodes({"train": (images, labels)}, ways=WAYS, shots=SHOTS, queries=QUERIES)
    assert equal(mapped.batch("train", range(3)), family().batch("train", range(3)))


def test_importing_tasks_imports_no_extra():
    code = (
        "import sys, metasam.tasks as tasks;"
        "tasks.Sinusoid().batch('train', [0]); tasks.EpisodeSampler([range(9)] * 3, 2, 1, 1)([0]);"
        "print({'PIL', 'matplotlib', 'torchvision', 'rich', 'learn2learn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_describe_and_protocol():
    source = family(rotations=True, seed=4)
    assert isinstance(source, TaskFamily)
    assert source.size("train") is None
    assert (source.output_size, source.input_shape, source.classification) == (WAYS, (1, 4, 4), True)
    facts = source.describe()
    assert facts["splits"]["train"] == {"classes": 12, "images": 96}
    assert (facts["ways"], facts["shots"], facts["queries"], facts["seed"]) == (WAYS, SHOTS, QUERIES, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ways": 1}, "ways to be an integer >= 2, got 1"),
        ({"shots": 0}, "shots to be an integer >= 1, got 0"),
        ({"queries": 0}, "queries to be an integer >= 1, got 0"),
        ({"seed": -1}, "seed to be an integer >= 0, got -1"),
        ({"queries": 2.5}, "queries to be an integer"),
        ({"ways": 13}, "13-way episodes need 13 classes, split 'train' has 12: set ways=12"),
        ({"shots": 4, "queries": 5}, "class '0' of split 'train' has 8 images, but 4 shots . 5 queries need 9: lower"),
    ],
)
def test_what_cannot_be_sampled_is_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        family(**options)


def test_the_class_that_is_too_small_is_named():
    images, labels = numbered(classes=3)
    with pytest.raises(ValueError, match="class 'gimel' of split 'train' has 7 images"):
        ImageEpisodes(
            {"train": (images[:-1], labels[:-1])}, ways=2, shots=1, queries=7, class_names=["aleph", "bet", "gimel"]
        )


def nan_image():
    images = numbered()[0].float()
    images[5, 0, 1, 1] = float("nan")
    return images


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (lambda x: x.float().div(0), lambda y: y, "image 0 holds NaN"),
        (lambda x: nan_image(), lambda y: y, "image 5 holds NaN"),
        (lambda x: x.long(), lambda y: y, "uint8 or float .N, C, H, W., got torch.int64"),
        (lambda x: x[:, 0], lambda y: y, r"got torch.uint8 \[96, 4, 4\]"),
        (lambda x: [["a"]], lambda y: y, "an array of numbers"),
        (lambda x: x, lambda y: y[:-1], "one label for each of 96 train images, got 95"),
        (lambda x: x, lambda y: y - 1, "labels >= 0; label 0 is -1"),
        (lambda x: x, lambda y: y.float(), "integer train labels"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(images, labels, message):
    x, y = numbered()
    with pytest.raises(ValueError, match=message):
        ImageEpisodes({"train": (images(x), labels(y))}, queries=2)


def test_named_labels_are_in_range_and_belong_to_one_split():
    x, y = numbered()
    with pytest.raises(ValueError, match="labels 0 to 10, as 11 class names were given; label 88 is 11"):
        ImageEpisodes({"train": (x, y)}, queries=2, class_names=[str(i) for i in range(11)])
    with pytest.raises(ValueError, match="class '0' is in both 'train' and 'test'"):
        ImageEpisodes({"train": (x, y), "test": (x, y)}, queries=2, class_names=[str(i) for i in range(12)])


def test_splits_and_numbers_that_do_not_exist():
    source = ImageEpisodes({"train": numbered()}, queries=2, name="mine")
    with pytest.raises(ValueError, match="out of 'train', 'validation', 'test', got 'val'"):
        source.batch("val", [0])
    with pytest.raises(ValueError, match="mine has no 'test' split, only train: pass its images"):
        source.batch("test", [0])
    for wrong in ([-1], [[0]], [0.5]):
        with pytest.raises(ValueError, match="task numbers >= 0"):
            source.batch("train", wrong)
    with pytest.raises(ValueError, match="a split out of"):
        ImageEpisodes({"dev": numbered()})
    with pytest.raises(ValueError, match="one shape"):
        ImageEpisodes({"train": numbered(), "test": numbered(size=5)}, queries=2)


# -- noisy supports, fewer classes -------------------------------------------------------------------------------------


def twelve(**options):
    """Three splits of twelve classes of eight images, whose first pixel is their class."""
    return family(**{"seed": 3, **options})


@pytest.mark.parametrize("split", ["train", "test"])
def test_noise_spoils_that_share_of_support_labels_and_nothing_else(split):
    tasks = range(4000)
    clean, noisy = twelve().batch(split, tasks), twelve(noise=0.3).batch(split, tasks)
    assert torch.equal(clean.support[0], noisy.support[0])
    assert torch.equal(clean.query[0], noisy.query[0])
    assert torch.equal(clean.query[1], noisy.query[1])
    right, given = clean.support[1], noisy.support[1]
    wrong = given != right
    n = wrong.numel()
    assert abs(float(wrong.double().mean()) - 0.3) < 4 * (0.3 * 0.7 / n) ** 0.5
    # where it is wrong it is each of the four others alike
    shift = ((given - right) % 5)[wrong]
    shares = shift.bincount(minlength=5)[1:] / len(shift)
    assert float((shares - 0.25).abs().max()) < 4 * (0.25 * 0.75 / len(shift)) ** 0.5
    # a task's labels are its own, in whatever batch it comes
    again = twelve(noise=0.3).batch(split, [7, 3])
    assert torch.equal(again.support[1], given[[7, 3]])
    assert not torch.equal(twelve(noise=0.3, seed=4).batch(split, tasks).support[1] != right, wrong)


def test_fewer_classes_are_some_of_the_training_classes_only():
    few, more = twelve(classes=6), twelve(classes=9)
    assert set(few.class_names("train")) < set(more.class_names("train")) < set(twelve().class_names("train"))
    assert len(few.class_names("train")) == 6
    assert len(few.class_names("test")) == 12
    seen = few.batch("train", range(200)).query[0][..., 0, 0, 0].mul(255).round().unique()
    assert {str(int(c)) for c in seen} == set(few.class_names("train"))
    assert few.class_names("train") != twelve(classes=6, seed=5).class_names("train")
    with pytest.raises(ValueError, match=r"at most 12, .* got classes=13"):
        twelve(classes=13)
    with pytest.raises(ValueError, match="5-way episodes need 5 classes"):
        twelve(classes=4)
    with pytest.raises(ValueError, match="probability below 1, got noise=1"):
        twelve(noise=1.0)
