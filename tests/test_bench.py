"""metasam-bench: contenders compute the same thing, take turns, and are written down."""

import csv
import doctest
import importlib.util
import json
import sys

import pytest
import torch

pytest.importorskip("hydra")
from hydra.core.global_hydra import GlobalHydra

from metasam.scripts.bench import contest, meta_steps, peers, report, run, works
from metasam.scripts.bench.contest import Contest, Drift, Here, LeftOut, Settings
from metasam.scripts.bench.process import Process, resident

QUICK = Settings(quick=True)
PROBLEMS = {
    "sinusoid": works.sinusoid_problem,
    "conv4": works.omniglot_problem,
    "mini": works.mini_problem,
}


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the command in this process, in an empty folder: (exit status, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["metasam-bench", *arguments])
        GlobalHydra.instance().clear()
        status = 0
        try:
            run.main()
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return called


def needs(package):
    if importlib.util.find_spec(package.lower()) is None:
        pytest.skip(f"{package} is not installed")


# -- they compute the same thing -------------------------------------------------------------------------------------


def found(make, problem):
    problem = problem.own()
    try:
        loss = make(problem)()
    except ImportError as error:
        pytest.skip(str(error))
    return loss.detach(), [p.grad for p in problem.model.parameters()]


def agree(make, other, problem):
    loss, grads = found(make, problem)
    expected, of = found(other, problem)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert any(g.abs().max() > 1e-3 for g in of)
    for g, e in zip(grads, of, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-9)


ALL = meta_steps.maml(Settings(quick=True, threads=2), small=True)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", [name for name in ALL if name != "metasam higher"])
def test_all_take_the_same_meta_step(name, problem):
    if name in peers.MAML:
        needs(name)
    if "traced" in name and problem != "sinusoid":
        pytest.skip("traced engines are for small networks")
    agree(ALL[name], ALL["metasam higher"], PROBLEMS[problem](QUICK).to(torch.float64))


def test_compiled_engines_are_for_small_networks_and_take_their_time():
    everywhere = {"learn2learn", "higher", "TorchOpt", "metasam higher", "metasam vmap"}
    assert set(meta_steps.maml(Settings())) == everywhere
    assert set(meta_steps.maml(Settings(), small=True)) == everywhere | {"metasam traced", "metasam compiled"}
    assert "metasam compiled" not in ALL


@pytest.mark.parametrize("problem", ["sinusoid", "conv4"])
@pytest.mark.parametrize("pair", list(meta_steps.by_hand()), ids=lambda pair: pair[0])
def test_loops_by_hand_take_the_same_meta_step(pair, problem):
    _, mine, _, by_hand = pair
    agree(mine, by_hand, PROBLEMS[problem](QUICK).to(torch.float64))


def test_sam_by_hand_is_not_maml_by_hand():
    problem = works.sinusoid_problem(QUICK).to(torch.float64)
    (_, none), (_, low) = (found(lambda p, low=low: meta_steps.loop(p, low=low), problem) for low in (False, True))
    assert (none[0] - low[0]).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["metasam", "metasam, as float32", *peers.SAMPLERS])
def test_samplers_draw_what_is_asked(name):
    images = works.Images(10, 4, ways=3, shots=1, queries=2, tasks=5)
    try:
        step = images.contenders()[name]()
    except ImportError as error:
        pytest.skip(str(error))
    drawn = step()
    drawn = drawn.unbind() if name.startswith("metasam") else drawn
    assert len(drawn) == 5
    for task in drawn:
        x, y, z, labels = (*task.support, *task.query) if name.startswith("metasam") else task[:4]
        assert (x.shape, z.shape) == ((3, 1, 28, 28), (6, 1, 28, 28))
        assert x.dtype == (torch.float32 if "float32" in name else torch.uint8)
        assert sorted(y.tolist()) == [0, 1, 2]
        assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2]


# -- measuring -------------------------------------------------------------------------------------------------------


class Clockwork:
    """A racer whose steps take a known time, and one that notes its turns."""

    def __init__(self, name, seconds, order):
        self.name, self.seconds, self.order = name, seconds, order

    def time(self, calls):
        self.order.append(self.name)
        if self.seconds is None:
            raise LeftOut("no")
        return self.seconds * calls

    def memory(self):
        return {"now": 2.0, "peak": 10.0 * self.seconds + 1, "before": 1.0}

    def close(self):
        self.order.append(f"{self.name} closed")


def raced(contest_of, times, repeats=3):
    order, done = [], []
    racers = {name: (lambda n=name, s=s: Clockwork(n, s, order)) for name, s in times.items()}
    result = contest.measure(contest_of, racers, QUICK, repeats, done.append)
    return result, order, done


def test_turns_start_from_another_contender_each():
    race = Contest("t", {}, bases={"b": "a", "c": "a"})
    result, order, done = raced(race, {"a": 1.0, "b": 2.0, "c": 0.5})
    assert order[:6] == list("aabbcc")  # warm-ups
    assert order[6:15] == list("abcbcacab")
    assert order[15:] == ["c closed", "b closed", "a closed"]
    assert len(done) == race.turns(["a", "b", "c"], 3) == 12
    assert [(r["ratio"], r["to"], r["kind"]) for r in result.rows] == [
        (None, None, "cost"), (2.0, "a", "cost"), (0.5, "a", "cost"),
    ]  # fmt: skip
    assert [r["peak_ratio"] for r in result.rows] == [None, 2.0, 0.5]


def test_speed_is_over_the_fastest_peer_that_is_there():
    race = Contest("t", {}, peers=("a", "b", "c"), tasks=8)
    result, _, _ = raced(race, {"a": 2.0, "b": 1.0, "c": None, "ours": 0.25})
    assert {r["contender"]: r["ratio"] for r in result.rows} == {"a": 0.5, "b": None, "ours": 4.0}
    assert result.rows[-1]["to"] == "b"
    assert result.rows[-1]["tasks_per_second"] == 32
    assert result.notes == ["c left out: no"]


def test_growth_is_fitted():
    race = Contest("t", {}, sizes={"1": 1, "4": 4, "16": 16})
    result, _, _ = raced(race, {"1": 1.0, "4": 2.0, "16": 4.0})
    assert result.notes == ["exponent 0.50 (0.50 to 0.50)"]
    assert [r["ratio"] for r in result.rows] == [None, 2, 4]


def test_what_cannot_be_built_is_left_out():
    def missing():
        raise ModuleNotFoundError("No module named 'learn2learn'", name="learn2learn")

    def broken():
        raise RuntimeError("no kernel\nfor this")

    for make, words in (
        (missing, "not installed (No module named 'learn2learn')"),
        (broken, "RuntimeError: no kernel"),
    ):
        with pytest.raises(LeftOut) as stop:
            Here(make, QUICK)
        assert str(stop.value) == words
        with pytest.raises(LeftOut):
            Here(lambda make=make: make, QUICK).time(1)


def test_fast_steps_are_timed_several_at_a_time():
    calls = []
    racers = {"a": lambda: Here(lambda: lambda: calls.append(1), Settings())}
    result = contest.measure(Contest("t", {}), racers, Settings(), 2)
    assert result.rows[0]["calls"] == 100
    assert len(calls) == 202


@pytest.mark.parametrize(("n", "ends"), [(1, (1, 1)), (5, (1, 5)), (6, (1, 6)), (15, (4, 12)), (21, (6, 16))])
def test_order_statistics_of_the_median(n, ends):
    """The usual table of ranks (Conover 1999, table A3 at p = 1/2)."""
    assert contest.interval([float(i) for i in range(n, 0, -1)]) == ends


@pytest.mark.parametrize("module", [contest, report], ids=lambda m: m.__name__)
def test_examples(module):
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed


def test_a_process_of_its_own():
    title = works.long(QUICK)[0].title
    lost = Process("long", title, "metasam", QUICK, keep=False)
    lost._process.kill()
    racer = Process("long", title, "metasam", QUICK, keep=False)
    try:
        assert racer.time(1) > 0
        memory = racer.memory()
        if resident() is not None:
            assert 0 < memory["before"] < memory["peak"]
        with pytest.raises(LeftOut, match="ended with status -9"):
            lost.time(1)
    finally:
        racer.close()
        lost.close()
    assert racer._process.returncode == 0


def test_all_works_name_contenders_that_they_have():
    for work, make in works.WORKS.items():
        contests = make(QUICK)
        assert contests, work
        assert len({c.title for c in contests}) == len(contests)
        for c in contests:
            assert c.contenders
            if isinstance(c, Drift):
                continue
            named = {*c.peers, *c.bases, *c.bases.values(), *c.keep}
            assert named <= c.contenders.keys()
            assert not c.sizes or c.sizes.keys() == c.contenders.keys()


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command(call, tmp_path):
    threads = torch.get_num_threads()
    typed = ["works=[sinusoid,optimizer,sampler]", "quick=true", "repeats=2", "threads=1", "out=here"]
    status, out, err = call(*typed)
    assert status == 0, err
    assert torch.get_num_threads() == threads
    assert "MAML, MLP" in out
    assert report.QUICK in out
    assert "bench  " in err
    assert "0s left" in err
    written = json.loads((tmp_path / "here/bench.json").read_text())
    assert written["command"].startswith("metasam-bench 'works=[sinusoid,optimizer,sampler]' quick=true")
    assert written["versions"]["torch"] == torch.__version__.partition("+")[0]
    by_work = {r["work"]: r for r in written["results"]}
    assert list(by_work) == ["sinusoid", "optimizer", "sampler"]
    row = next(r for r in by_work["sinusoid"]["rows"] if r["contender"] == "metasam vmap")
    assert len(row["seconds"]) == 2
    assert row["min"] <= row["median"] <= row["max"]
    rows = list(csv.DictReader((tmp_path / "here/bench.csv").read_text().splitlines()))
    assert {r["work"] for r in rows} == set(by_work)
    mine = [float(r["seconds"]) for r in rows if r["work"] == "sinusoid" and r["contender"] == "metasam vmap"]
    assert mine == pytest.approx(row["seconds"])
    text = (tmp_path / "here/bench.md").read_text()
    assert "| metasam SAM |" in text
    assert written["device"] in text


def test_some_contenders(call, tmp_path):
    status, out, err = call(
        "works=[sinusoid]", "contenders=['*vmap']", "quick=true", "repeats=1", "threads=1", "out=here"
    )
    assert status == 0, err
    assert "metasam vmap" in out
    assert "metasam higher" not in out


def test_memory_over_many_steps(call, tmp_path):
    """Of a process of its own, that ends."""
    if resident() is None:
        pytest.skip("this system does not tell")
    status, _, err = call("works=[growth]", "contenders=['metasam higher']", "quick=true", "threads=1", "out=here")
    assert status == 0, err
    (result,) = json.loads((tmp_path / "here/bench.json").read_text())["results"]
    assert abs(result["rows"][0]["growth_mib"]) < 20
    assert "growth" in (tmp_path / "here/bench.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["works=[sinusoids]"], "got sinusoids; did you mean 'sinusoid'?"),
        (["works=sinusoid"], "expected works to be a list such as [sinusoid,conv4], got works=sinusoid"),
        (["works=[]"], "expected works to be a list"),
        (
            ["works=[sinusoid]", "contenders=[learn2lern]"],
            "matches none of these works; there are: learn2learn; higher",
        ),
        (["contenders=metasam"], "expected contenders to be a list"),
        (["repeats=0"], "expected repeats to be a whole number of at least 1, got repeats=0"),
        (["threads=two"], "expected threads to be a whole number of at least 1, got threads=two"),
        (["clock=sun"], "expected clock among wall, cpu, got clock=sun"),
        (["device=tpu"], "expected device among cpu, cuda, mps, auto, got device=tpu"),
        (["quick=2"], "expected quick to be true or false"),
        (["out=null"], "expected out to be a folder"),
        (["work=[sinusoid]"], "unknown key work; did you mean 'works'?"),
        (["works=[sinusoid]", "out=file/x"], "cannot write to the out folder file/x"),
    ],
)
def test_mistakes(call, arguments, words, tmp_path):
    (tmp_path / "file").touch()
    status, out, err = call(*arguments)
    assert status == 2
    assert not out
    assert len(err.strip().splitlines()) == 1, err
    assert words in err
