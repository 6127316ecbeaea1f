"""The record of a run, and its pictures."""

import json
import math

import pytest

from metasam.training import metrics, plots
from metasam.training.metrics import Metrics


def write(folder, steps, start=0, **options):
    with Metrics(folder, start, tensorboard=False, **options) as log:
        for i in range(start + 1, start + steps + 1):
            log.write(i, loss=1 / i, accuracy=None)


def test_resuming_drops_what_is_done_again(tmp_path):
    write(tmp_path, 10)
    write(tmp_path, 5, start=7)
    assert [e["iteration"] for e in metrics.read(tmp_path)] == list(range(1, 13))
    write(tmp_path, 2)  # afresh
    assert metrics.read(tmp_path) == [
        {"iteration": 1, "loss": 1.0, "accuracy": None},
        {"iteration": 2, "loss": 0.5, "accuracy": None},
    ]


@pytest.mark.parametrize("tail", ['{"iteration": 4, "lo', '{"iteration": 4}', "\0\0\0\0", "[]\n"])
def test_a_line_cut_short(tmp_path, tail):
    write(tmp_path, 3)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(tail)
    assert len(metrics.read(tmp_path)) == 3
    write(tmp_path, 2, start=3)
    assert [e["iteration"] for e in metrics.read(tmp_path)] == [1, 2, 3, 4, 5]


def test_not_finite_is_null(tmp_path):
    with Metrics(tmp_path, tensorboard=False) as log:
        log.write(1, loss=math.nan, accuracy=math.inf)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"iteration": 1, "loss": None, "accuracy": None}


def test_tensorboard_events(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Metrics(tmp_path) as log:
        for i in (1, 2, 3):
            log.write(i, loss=1 / i)
    with Metrics(tmp_path, 2) as log:  # the third is done again
        log.write(3, loss=7.0)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5), (3, 7.0)]


@pytest.mark.parametrize("quantity", ["accuracy", "loss"])
def test_learning_curve(tmp_path, quantity):
    pytest.importorskip("matplotlib")
    entries = [
        {"iteration": i, "loss": 1 / i, "accuracy": 0.5 if quantity == "accuracy" else None} for i in range(1, 200)
    ]
    for entry in entries[9::10]:
        entry |= {f"validation_{quantity}": 0.4, "validation_ci95": 0.05}
    path = tmp_path / "curve.png"
    assert plots.learning_curve(entries, path, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]


def test_nothing_to_draw(tmp_path):
    assert not plots.learning_curve([], tmp_path / "curve.png")
    assert not plots.learning_curve([{"iteration": 1, "loss": None}], tmp_path / "curve.png")
    assert not list(tmp_path.iterdir())


def test_comparison(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {"none": [[(1.0, 0.3), (2.0, 0.4)]], "up": [[(2.0, 0.3), (4.0, 0.5)], [(2.0, 0.2), (4.0, 0.3)]]}
    assert plots.comparison(curves, {"none": (0.4, 0.01), "up": (0.5, 0.02)}, tmp_path / "c.png", "a title")
    assert (tmp_path / "c.png").stat().st_size > 1000


def test_lines_that_are_missing_are_said_to_be(tmp_path, capsys):
    write(tmp_path, 10)
    write(tmp_path, 1, start=10)
    assert not capsys.readouterr().err
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:6]))
    write(tmp_path, 1, start=11)
    assert "has 6 of the 11 lines up to iteration 11" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").unlink()
    write(tmp_path, 1, start=12)
    assert "has 0 of the 12 lines" in capsys.readouterr().err
