import math

import pytest
import torch

from metasam.tasks import Sinusoid, TaskFamily


def test_curves_have_the_published_ranges():
    family = Sinusoid(shots=50, queries=50)
    assert isinstance(family, TaskFamily)
    task = family.batch("train", range(2000))
    x = torch.cat([task.support[0], task.query[0]], 1).double()[..., 0]
    y = torch.cat([task.support[1], task.query[1]], 1).double()[..., 0]
    assert x.min() >= -5
    assert x.max() < 5
    assert abs(x.mean()) < 5 * 10 / 12**0.5 / len(x.flatten()) ** 0.5
    # a sin(x - p) = u sin x + v cos x: least squares gives amplitude and phase back, and no residue
    basis = torch.stack([x.sin(), x.cos()], -1)
    fit = torch.linalg.lstsq(basis, y.unsqueeze(-1)).solution
    assert (basis @ fit - y.unsqueeze(-1)).abs().max() < 1e-5
    amplitude, phase = fit[..., 0].norm(dim=1), torch.atan2(-fit[:, 1, 0], fit[:, 0, 0])
    for values, low, high in ((amplitude, 0.1, 5.0), (phase, 0.0, math.pi)):
        assert values.min() > low - 1e-4
        assert values.max() < high + 1e-4
        assert abs(values.mean() - (low + high) / 2) < 5 * (high - low) / 12**0.5 / 2000**0.5


def test_a_task_depends_on_seed_split_and_number_alone():
    family = Sinusoid(noise=0.1)
    whole = family.batch("validation", range(33))
    for number, task in enumerate(whole.unbind()):
        alone = family.batch("validation", [number]).unbind()[0]
        assert all(
            torch.equal(a, b) for a, b in zip(task.support + task.query, alone.support + alone.query, strict=True)
        )
    assert not torch.equal(whole.support[0], family.batch("test", range(33)).support[0])
    assert not torch.equal(whole.support[0], Sinusoid(seed=1, noise=0.1).batch("validation", range(33)).support[0])


def test_noise_is_on_support_targets_only():
    clean, noisy = (Sinusoid(noise=n).batch("train", range(1000)) for n in (0.0, 0.5))
    assert torch.equal(clean.support[0], noisy.support[0])
    assert torch.equal(clean.query[1], noisy.query[1])
    error = noisy.support[1] - clean.support[1]
    assert abs(error.std() - 0.5) < 5 * 0.5 / 20000**0.5
    assert clean.support[1].dtype == torch.float32


def test_facts_and_refusals():
    family = Sinusoid()
    assert family.describe() == {"name": "sinusoid", "shots": 10, "queries": 10, "seed": 0, "noise": 0.0}
    assert family.size("test") is None
    for options in ({"shots": 0}, {"queries": 0}, {"noise": -1.0}, {"noise": math.nan}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Sinusoid(**options)
    with pytest.raises(ValueError, match="'train', 'validation', 'test', got 'dev'"):
        family.batch("dev", [0])
    with pytest.raises(ValueError, match="task numbers >= 0"):
        family.batch("train", [-1])
