"""Every YAML file composes, and what it describes can be built; and how objects are built from mappings."""

import fractions
import functools
from pathlib import Path

import pytest
import torch

from metasam import configure
from metasam.configure import did_you_mean, flatten, instantiate, locate, offer, parameters, plain
from metasam.rules import NAMED, make
from metasam.tasks import Sinusoid
from metasam.tasks.streams import Supervised
from metasam.training import assemble
from metasam.types import Task

pytest.importorskip("hydra")
import hydra

from metasam.scripts import command

CONFIGS = Path(__file__).parents[1] / "configs"
OPTIONS = [p.relative_to(CONFIGS).with_suffix("") for p in sorted(CONFIGS.rglob("*.yaml")) if p.parent != CONFIGS]


def compose(*overrides, name="train"):
    with hydra.initialize_config_module("metasam.configs", version_base="1.3"):
        return command.plain_config(hydra.compose(name, list(overrides)))


class Letters:
    """Stands in for families whose data are not here."""

    output_size, input_shape, classification = 5, (1, 28, 28), True

    def __init__(self, ways=5, shots=1, queries=1, **_):
        self.output_size = ways

    def batch(self, split, tasks):
        images = torch.zeros(len(tasks), 2, *self.input_shape), torch.arange(2).expand(len(tasks), 2)
        return Task(images, images)

    def size(self, split): ...

    def describe(self): ...


SUPERVISED = {"digits", "cifar10", "cifar100", "folder", "npz"}


def small_data(batch_size=4, seed=0, **_):
    """Stands in for data sets, whose files are not here."""
    x, y = torch.zeros(8, 3, 32, 32), torch.arange(8) % 4
    return Supervised((x, y), (x, y), (x, y), batch_size=batch_size, seed=seed)


def test_all_files_are_found():
    assert {"rule", "model", "tasks", "optim", "experiment"} == {p.parts[0] for p in OPTIONS}
    assert len(OPTIONS) >= 18


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_option_composes_and_builds(option, monkeypatch):
    group, name = option.parts
    if name == "custom":
        with pytest.raises(ValueError, match=f"expected a value for {group}._target_"):
            assemble.check(compose(f"{group}=custom"))
        return
    variant = {"plain": "none", "momentum": "up"}.get(name, "both")
    config = compose(f"{group}={name}", *([] if name in SUPERVISED else [f"variant={variant}"]))
    if name in SUPERVISED:
        monkeypatch.setattr(config["tasks"]["_target_"], small_data)
    for target in ("Glyphs", "Omniglot", "OmniglotOneShot"):
        monkeypatch.setattr(f"metasam.tasks.{target}", Letters)
    for key in {"root", "path"} & set(config["tasks"]):
        config["tasks"][key] = "somewhere"
    learner, recorded = assemble.build(config)
    assert isinstance(learner.optimizer, torch.optim.Optimizer)
    # the record of the run is enough to build what it trains
    if name in SUPERVISED:
        assert instantiate(recorded["network"]).state_dict().keys() == learner.model.state_dict().keys()
        return
    assert learner.maml.variant == variant
    again = instantiate(recorded["maml"])
    assert again.inner_rule == learner.maml.inner_rule
    assert again.model.state_dict().keys() == learner.maml.model.state_dict().keys()


@pytest.mark.parametrize("config", sorted(p.stem for p in CONFIGS.glob("*.yaml")))
def test_commands_have_a_config(config):
    assert compose(name=config).get("run") in (None, "???")


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_rule_file_is_the_rule_of_that_name(name):
    assert (CONFIGS / "rule" / f"{name}.yaml").exists(), f"expected configs/rule/{name}.yaml for the rule {name!r}"
    node = compose(f"rule={name}")["rule"]
    assert instantiate(node) == make(name)
    # Hydra takes only keys that a file lists, so each lists all
    taken, _ = parameters(locate(node["_target_"]))
    assert taken.keys() == {k for k in node if k != "_target_"}


@pytest.mark.parametrize("target", ["Glyphs", "Omniglot", "OmniglotOneShot", "Sinusoid"])
def test_a_task_file_lists_every_argument(target):
    name = {"OmniglotOneShot": "omniglot_oneshot"}.get(target, target.lower())
    node = compose(f"tasks={name}", "seed=0")["tasks"]
    taken, _ = parameters(locate(node["_target_"]))
    assert set(taken) - {"ways", "shots", "queries", "seed"} == {k for k in node if k != "_target_"}


def test_keys_reach_the_learner():
    config = compose(
        "tasks=sinusoid", "variant=both", "rule=asam", "rule@inner.rule=multistep", "rho_low=0.3", "rho_up=0.7",
        "inner.lr=0.02", "inner.steps=3", "inner.recompute=2", "inner.params=[head.*]", "first_order=true",
        "batchnorm=frozen", "engine=higher", "chunk_size=2", "optim=sgd", "optim.lr=0.5", "rule.perturb.eta=0.2",
        "model.hidden=[7]",
    )  # fmt: skip
    learner, recorded = assemble.build(config)
    maml, optimizer = learner.maml, learner.optimizer
    assert isinstance(learner.family, Sinusoid)
    assert maml.inner_rule == make("multistep", rho=0.3)
    assert maml.outer_rule.rho == 0.7
    assert maml.outer_rule.perturb.eta == 0.2
    assert (maml.loop.lr, maml.loop.steps, maml.loop.first_order, maml.loop.policy) == (0.02, 3, True, "frozen")
    assert (maml.engine, maml.chunk_size) == ("higher", 2)
    assert maml.inner_params == ["head.*"]
    assert maml.loop.recompute == 2
    assert maml.model.head.in_features == 7
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["lr"] == 0.5
    assert recorded["maml"]["inner_lr"] == 0.02


@pytest.mark.parametrize(("variant", "slots"), [("none", "--"), ("low", "+-"), ("up", "-+"), ("both", "++")])
def test_a_variant_uses_the_rules_and_radii_of_its_slots(variant, slots):
    config = compose("tasks=sinusoid", f"variant={variant}", "rho_low=0.1", "rho_up=0.2")
    maml = assemble.build(config).learner.maml
    assert maml.variant == variant
    got = [getattr(rule, "rho", None) for rule in (maml.inner_rule, maml.outer_rule)]
    assert got == [rho if slot == "+" else None for rho, slot in zip((0.1, 0.2), slots, strict=True)]


def test_the_seed_fixes_the_weights():
    def weights(seed):
        return assemble.build(compose("tasks=sinusoid", f"seed={seed}")).learner.maml.model.head.weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_folders_differ_where_runs_do():
    config = {"variant": "low", "seed": 1, "inner": {"lr": 0.1}, "run": None, "resume": False}
    folder = assemble.run_folder(config, "glyphs", "sam")
    assert folder == assemble.run_folder({**config, "resume": True}, "glyphs", "sam")
    assert folder != assemble.run_folder({**config, "inner": {"lr": 0.2}}, "glyphs", "sam")
    assert folder.parts[:1] == ("runs",)


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ways=1", "ways to be a whole number of at least 2, got ways=1"),
        ("shots=0", "shots .* at least 1, got shots=0"),
        ("queries=-2", "queries"),
        ("iterations=-1", "iterations .* got iterations=-1"),
        ("iterations=2.5", "iterations .* got iterations=2.5"),
        ("seed=x", "seed"),
        ("batchnorm=foo", "batchnorm to be one of batch, per_step, frozen, got batchnorm=foo"),
        ("batchnorm=bach", "did you mean 'batch'"),
        ("variant=bth", "did you mean 'both'"),
        ("inner.lr=nan", "inner.lr to be a finite number above 0, got inner.lr=nan"),
        ("inner.lr=0", "inner.lr"),
        ("inner.steps=0", "inner.steps"),
        ("inner.recompute=0", "inner.recompute to be a whole number of at least 1, auto, or null"),
        ("inner.recompute=some", "inner.recompute"),
        ("inner.params=head", r"inner.params .*\[head"),
        ("optim.lr=-1", "optim.lr"),
        ("rho_low=-0.1", "rho_low to be a finite number of at least 0, or null, got rho_low=-0.1"),
        ("rho_up=inf", "rho_up"),
        ("first_order=1", "first_order to be true or false"),
        ("threads=0", "threads"),
        ("device=gpu", "device"),
        ("tasks=omniglot", "expected a value for tasks.root, got none: set tasks.root="),
        ("seed=100000000000000000000000", "seed to be .* below 2.*63, got seed=1"),
        ("inner=null", "expected inner to have keys of its own, got inner=null: set its keys, as inner.lr="),
        ("outer=null", "expected outer to have keys"),
        ("budget=null", "budget=null: set its keys, as budget.passes="),
        ("diagnostics=null", "diagnostics=null"),
        ("loss=null", "loss=null: set loss._target_="),
    ],
)
def test_values_out_of_range(override, message):
    with pytest.raises(ValueError, match=message):
        assemble.check(compose(override))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rule=plain"], "variant=both puts a rule in the inner loop, and plain is none.*variant=none"),
        (["variant=up", "rule@outer.rule=plain"], "in the outer loop"),
        (
            ["model=custom", "model._target_=torch.nn.Lineer"],
            r"model\._target_: 'torch\.nn' has no .*did you mean 'Linear'",
        ),
        (["model=custom", "model._target_=fractions.Fraction"], r"model: expected a torch\.nn\.Module, got Fraction"),
        (["model=mlp", "+model.depth=3"], r"model: metasam\.models\.mlp: takes no argument 'depth'"),
        (["tasks=custom", "tasks._target_=fractions.Fraction"], "without output_size, input_shape"),
        (["loss._target_=torch.nn.functional.mse_los"], r"loss\._target_: .*did you mean 'mse_loss'"),
        (["optim.betas=[2,0.9]"], "Invalid beta"),
        (["+model.nothing=1"], "takes no argument 'nothing'"),
        (["optim.betas=3"], r"optim: torch\.optim\.Adam: expected betas to be like \(0\.9, 0\.999\), got betas=3"),
        (["optim=sgd", "optim.momentum=abc"], r"optim: torch\.optim\.SGD: expected momentum to be like .*'abc'"),
        (["model.hidden=null"], r"model: metasam\.models\.mlp: expected hidden to be a list .* got hidden=None"),
        (["model.hidden=four"], "expected hidden to be a list .* got hidden='four'"),
        (["batch_size=4"], "batch_size=4: few-shot tasks have tasks_per_batch="),
        (
            ["model=custom", "model._target_=torch.nn.Linear", "+model.in_features=3", "+model.out_features=1"],
            r"model: torch\.nn\.Linear does not take examples of shape \[1\]: .*model=mlp takes any shape",
        ),
        (["+loss.reduction=none"], r"mse_loss to give one number, a 0-dim tensor; got \[10, 1\]"),
    ],
)
def test_what_cannot_be_built(overrides, message):
    config = compose("tasks=sinusoid", *overrides)
    with pytest.raises((ValueError, TypeError), match=message):
        assemble.build(config)


def test_the_network_and_the_loss_are_tried_and_nothing_is_changed_by_it(monkeypatch):
    def net(kind):
        def build(ways=3, input=1):
            layers = torch.nn.Linear(input, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, ways)
            return torch.nn.Sequential(torch.nn.Flatten(), *(layers if kind == "fits" else layers[:2]))

        return build

    def data(batch_size=4, seed=0):
        x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 8
        return Supervised((x, y), (x, y), (x, y), batch_size=batch_size, seed=seed)

    for kind in ("fits", "narrow"):
        monkeypatch.setattr(f"metasam.models.{kind}", net(kind), raising=False)
    monkeypatch.setattr("metasam.tasks.eight", data, raising=False)
    words = ["tasks=custom", "tasks._target_=metasam.tasks.eight", "variant=null", "model=custom"]
    learner, _ = assemble.build(compose(*words, "model._target_=metasam.models.fits"))
    drawn = torch.rand(3)
    torch.manual_seed(0)
    fresh = net("fits")(8, 6)
    assert torch.equal(torch.rand(3), drawn)
    assert learner.model.training
    for k, v in fresh.state_dict().items():
        assert torch.equal(learner.model.state_dict()[k], v)
    with pytest.raises(ValueError, match=r"at least one number a class, \[N, 8\]; got outputs \[N, 4\]"):
        assemble.build(compose(*words, "model._target_=metasam.models.narrow"))
    words += ["model._target_=metasam.models.fits"]
    for target in ("functional.mse_loss", "MSELoss"):
        with pytest.raises(
            ValueError, match=r"loss: torch.*does not take outputs \[2, 8\] with labels \[2\]: .*cross_ent"
        ):
            assemble.build(compose(*words, f"loss._target_=torch.nn.{target}"))
    with pytest.raises(
        ValueError, match=r"model: metasam\.models\.conv does not take examples of shape \[6\]: .*features"
    ):
        assemble.build(compose(*words[:3], "model=conv"))


@pytest.mark.parametrize("key", ["shots=2", "inner.lr=0.1", "first_order=true", "tasks_per_batch=8", "test_tasks=5"])
def test_supervised_runs_refuse_keys_that_play_no_part(key, monkeypatch):
    words = ["tasks=custom", "tasks._target_=metasam.tasks.some", "variant=null", "model=conv"]
    monkeypatch.setattr("metasam.tasks.some", small_data, raising=False)
    assemble.build(compose(*words))
    with pytest.raises(ValueError, match=f"{key}.*plays no part: leave it out".replace("true", "True")):
        assemble.build(compose(*words, key))
    monkeypatch.setattr("metasam.tasks.some", lambda shots=1, **_: small_data(), raising=False)
    if key.startswith("shots"):  # a source that asks for it has a use for it
        assemble.build(compose(*words, key))


def test_the_few_shot_keys_are_those_of_the_file():
    flat = flatten(compose())
    assert {k: flat[k] for k in assemble.FEW_SHOT} == assemble.FEW_SHOT


def test_two_ends_of_a_run():
    with pytest.raises(ValueError, match=r"epochs=3 and budget\.passes=10 both say when a run ends"):
        assemble.check(compose("epochs=3", "budget.passes=10"))
    assemble.check(compose("iterations=3", "budget.passes=10"))


def test_errors_of_a_target_keep_what_they_are(tmp_path):
    class Odd(RuntimeError):
        def __init__(self, a, b): ...

    with pytest.raises(FileNotFoundError, match=r"tasks: metasam\.tasks\.supervised\.npz: expected a file"):
        instantiate({"tasks": {"_target_": "metasam.tasks.supervised.npz", "path": str(tmp_path / "no.npz")}})
    with pytest.raises(ValueError, match=r"x: torch\.zeros: "):
        instantiate({"x": {"_target_": "torch.zeros", "size": [-1]}})
    for error in (Odd(1, 2), OverflowError(1, 2)):
        with pytest.raises(ValueError, match=r"key: a\.B: \(1, 2\)"), configure.naming("key", "a.B", {}):
            raise error


def test_a_radius_for_a_rule_without_one(monkeypatch):
    monkeypatch.setattr("metasam.rules.NoRadius", type("NoRadius", (), {"__init__": lambda self: None}), raising=False)
    config = compose("tasks=sinusoid", "rho_low=0.1", "rule=custom", "rule._target_=metasam.rules.NoRadius")
    with pytest.raises(ValueError, match=r"rho_low=0\.1: the rule metasam\.rules\.NoRadius has no radius"):
        assemble.build(config)


def test_losses_that_are_classes_and_functions():
    for target in ("torch.nn.functional.mse_loss", "torch.nn.MSELoss", "torch.nn.HuberLoss"):
        maml = assemble.build(compose("tasks=sinusoid", f"loss._target_={target}")).learner.maml
        assert float(maml.loop.loss_fn(torch.ones(2), torch.ones(2))) == 0


# -- building from mappings ------------------------------------------------------------------------------------------


def test_instantiate_inside_out():
    half = {"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2}
    built = instantiate({"_target_": "fractions.Fraction", "numerator": half, "denominator": 3})
    assert built == fractions.Fraction(1, 6)
    assert instantiate({"a": [half, {"b": half}], "c": 1}) == {
        "a": [fractions.Fraction(1, 2), {"b": built * 3}],
        "c": 1,
    }
    assert instantiate([1, "x", None]) == [1, "x", None]
    partial = instantiate({"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5})
    assert isinstance(partial, functools.partial)
    assert partial(torch.nn.Linear(1, 1).parameters()).defaults["lr"] == 0.5
    ready = object()
    assert instantiate({"x": ready})["x"] is ready


@pytest.mark.parametrize(
    ("node", "error", "message"),
    [
        (
            {"a": {"_target_": "nowhere.Net"}},
            ValueError,
            r"a: nowhere\.Net: no module named 'nowhere'.*current directory",
        ),
        ({"a": [{"_target_": "torch.nn.Linar"}]}, ValueError, r"a\[0\]: torch\.nn\.Linar: .*did you mean 'Linear'"),
        ({"_target_": "net"}, ValueError, "dotted path such as 'my_module.Net', got 'net'"),
        ({"_target_": None}, ValueError, "dotted path"),
        ({"_target_": "math.pi"}, ValueError, "expected something to call, got float"),
        ({"_target_": "torch.nn.Linear", "in_features": 1}, ValueError, "needs the argument 'out_features'"),
        (
            {"m": {"_target_": "torch.nn.Linear", "in_features": 1, "out_featurs": 2}},
            ValueError,
            r"m: torch\.nn\.Linear: takes no argument 'out_featurs'; did you mean 'out_features'.*takes: in_features",
        ),
        (
            {"a": {"b": {"_target_": "fractions.Fraction", "numerator": "x"}}},
            ValueError,
            r"a\.b: fractions\.Fraction: Invalid",
        ),
        ({"_target_": "fractions.Fraction", "numerator": 1.5, "denominator": 2}, TypeError, "fractions.Fraction: both"),
    ],
)
def test_instantiate_names_key_and_target(node, error, message):
    with pytest.raises(error, match=message):
        instantiate(node)


def test_a_module_that_fails_to_import_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken_module_of_mine.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"cannot import 'broken_module_of_mine'.*a_package_that_is_not_there"):
        locate("broken_module_of_mine.Net")


def test_offer_gives_what_is_named_and_not_set():
    node = {"_target_": "metasam.models.conv4", "hidden": 8, "ways": 7}
    assert offer(node, ways=5, in_channels=3, seed=1) == {**node, "in_channels": 3}


def test_plain_values_only():
    assert plain({"a": (1, 2.5, None, True, "x"), 3: {}}) == {"a": [1, 2.5, None, True, "x"], "3": {}}
    with pytest.raises(TypeError, match=r"expected a plain value .* got Tensor"):
        plain({"a": torch.ones(1)})
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
    assert did_you_mean("qqq", ["sam"]) == ""
    assert configure.parameters(dict) == ({}, True)
