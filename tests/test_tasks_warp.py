import math

import pytest
import torch

from metasam.tasks import ImageEpisodes
from metasam.tasks import warp as module
from metasam.tasks.counter import task_keys
from metasam.tasks.warp import warp


def smooth_images(count: int, size: int = 33) -> torch.Tensor:
    """Pictures of one blob each, smooth enough for bilinear reading, away from the border."""
    grid = torch.linspace(-1, 1, size, dtype=torch.float64)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    centres = torch.linspace(-0.3, 0.3, count, dtype=torch.float64)
    return torch.stack([torch.exp(-((x - c) ** 2 + 2 * (y + c) ** 2 + x * y) / 0.1) for c in centres])


def test_strength_0_leaves_images_alone():
    images = smooth_images(6).view(1, 2, 3, 1, 33, 33)
    torch.testing.assert_close(warp(images, task_keys(0, 0, [3]), 0.0), images, atol=1e-12, rtol=0)


def test_images_of_a_class_share_a_map_and_classes_do_not(monkeypatch):
    monkeypatch.setattr(module, "JITTER", 0.0)
    monkeypatch.setattr(module, "SHIFT", 0.0)
    images = smooth_images(1).expand(2, 3, 4, 1, 33, 33)
    warped = warp(images, task_keys(0, 0, [0, 1]), 1.0)
    assert torch.equal(warped[:, :1].expand_as(warped), warped)
    flat = warped[:, 0].flatten(0, 1)
    distances = torch.cdist(flat.flatten(1), flat.flatten(1)) + 100 * torch.eye(8)
    assert distances.min() > 0.1


def test_jitter_is_smaller_than_the_map_of_a_class():
    images = smooth_images(1).expand(20, 2, 5, 1, 33, 33)
    warped = warp(images, task_keys(0, 0, range(20)), 1.0)
    within = (warped[:, 0] - warped[:, 1]).flatten(2).norm(dim=-1).mean()
    between = (warped[:, 0] - warped[:, 0].roll(1, dims=1)).flatten(2).norm(dim=-1).mean()
    assert 0 < within < between


def test_a_turn_is_the_matrix_of_its_angle():
    draws = torch.tensor([[1.0, 0.5, 0.5, 0.5]], dtype=torch.float64)  # the largest turn, no stretch, no shear
    c, s = math.cos(math.pi / 6), math.sin(math.pi / 6)
    expected = torch.tensor([[[c, -s], [s, c]]], dtype=torch.float64)
    torch.testing.assert_close(module._matrices(draws, 1.0), expected, atol=1e-15, rtol=0)


def family(**settings) -> ImageEpisodes:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (60, 1, 12, 12), dtype=torch.uint8, generator=generator)
    data = {split: (images, torch.arange(60) % 6) for split in ("train", "test")}
    return ImageEpisodes(data, ways=3, shots=2, queries=3, **settings)


def test_only_training_is_warped_and_labels_stay():
    plain, warped = family(), family(warp=0.7)
    for split, changed in {"train": True, "test": False}.items():
        a, b = plain.batch(split, range(4)), warped.batch(split, range(4))
        assert torch.equal(a.support[0], b.support[0]) != changed
        assert torch.equal(a.query[0], b.query[0]) != changed
        assert torch.equal(a.support[1], b.support[1])
        assert torch.equal(a.query[1], b.query[1])
        assert a.query[0].shape == b.query[0].shape


def test_a_warped_task_is_a_pure_function_of_its_number():
    together, alone = family(warp=1.0).batch("train", [5, 9, 2]), family(warp=1.0).batch("train", [9])
    assert torch.equal(together.support[0][1], alone.support[0][0])
    assert torch.equal(together.query[0][1], alone.query[0][0])


def test_a_strength_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"warp between 0 \(none\) and 2, got warp=-1"):
        family(warp=-1)
