"""What the commands share: Hydra's command line, with every job checked first and errors that say what to type."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from metasam import ranks
from metasam.configure import Config, did_you_mean, flatten
from metasam.scripts.memory import keep_freed_memory

CONFIGS = "pkg://metasam.configs"
SLOTS = ("model", "rule", "optim", "tasks")
"""Config groups whose place a user's own ``_target_`` can take."""
PACKAGED = {"inner.rule": "rule@inner.rule", "outer.rule": "rule@outer.rule"}
"""Keys that select from the group of another name."""
FREE = ("loss",)
"""Nodes that are no groups, whose keys are the arguments of whatever they name."""
SWEEP = {"-m", "--multirun"}

UserError = (ValueError, TypeError, OSError, ImportError, FloatingPointError)


class Stop(Exception):  # noqa: N818 - a wish, not an error
    """End the command with this message and status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def main(
    name: str,
    config_name: str,
    run: Callable[[Config], None],
    check: Callable[[Config], None],
    free: tuple[str, ...] = FREE,
    split: bool = False,
) -> None:
    """Run a command.

    Every job of the command line is composed and checked before the first one starts.

    Args:
        name: of the command, for messages.
        config_name: the YAML file in `metasam.configs`.
        run: does the work of one job.
        check: raises ValueError if the values of a config cannot work.
        free: nodes that take any key, unless the command line chooses what they are.
        split: whether one job can be split over the processes that torchrun starts.
    """
    if ranks.launched() and (not split or SWEEP & set(sys.argv)):
        what = f"{name} --multirun" if split else name
        _fail(name, ValueError(f"{what} runs in one process, got several of torchrun: start it without torchrun"))
    try:
        _main(name, config_name, run, check, free)
    except KeyboardInterrupt:  # outside of training, where nothing is left to save
        _say(f"{name}: interrupted")
        sys.exit(130)


def _main(
    name: str,
    config_name: str,
    run: Callable[[Config], None],
    check: Callable[[Config], None],
    free: tuple[str, ...],
) -> None:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that my_module.Net is found from an installed command too
    keep_freed_memory()
    given = sys.argv[1:]
    try:
        sys.argv[1:] = [*_slots(given, free)]
        _check_all(sys.argv[1:], config_name, check)
    except (HydraException, OmegaConfBaseException, *UserError) as error:
        _fail(name, error)

    def job(config: DictConfig) -> None:
        try:
            run(plain_config(config))
        except Stop as stop:
            _say(f"{name}: {stop}")
            sys.exit(stop.status)
        except UserError as error:
            _fail(name, error)

    hydra.main(version_base="1.3", config_path=CONFIGS, config_name=config_name)(job)()


def choice(group: str) -> str:
    """The option chosen from a config group in this job; "none" for none."""
    return str(HydraConfig.get().runtime.choices.get(group) or "none").replace("/", "-")


def sweeping() -> bool:
    """Whether this job is one of a ``--multirun``."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def command_line(**changed: str) -> str:
    """The command of this job, to be shown or recorded; with some keys set anew."""
    name = os.path.basename(sys.argv[0])
    overrides = [o for o in HydraConfig.get().overrides.task if o.partition("=")[0] not in changed]
    program = f"python {shlex.quote(sys.argv[0])}" if name.endswith(".py") else name
    if ranks.launched():
        machines = " --standalone" if os.environ.get("GROUP_WORLD_SIZE") == "1" else " ..."
        module = f"-m metasam.scripts.{name.removesuffix('.py').removeprefix('metasam-')}"
        program = f"torchrun{machines} --nproc-per-node={os.environ.get('LOCAL_WORLD_SIZE')} {module}"
    return " ".join([program, *map(shlex.quote, overrides), *(f"{k}={v}" for k, v in changed.items())])


def _fail(name: str, error: BaseException) -> None:
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
    _say(f"{name}: error: {error or type(error).__name__}")
    sys.exit(2)


def _say(message: str) -> None:
    """Tell the user, once for all processes of a run."""
    if ranks.speaks(message):
        print(message, file=sys.stderr, flush=True)


# -- own targets -----------------------------------------------------------------------------------------------------


def _slots(arguments: list[str], free: tuple[str, ...] = FREE) -> Iterator[str]:
    """The arguments in Hydra's own terms.

    ``model._target_=my.Net`` alone takes the place of the default network, whose keys it must not get: it selects
    ``model=custom``, whose keys are free. ``inner.rule=asam`` selects from the group ``rule``. ``loss.weight=[1,2]`` is
    an argument of the loss.
    """
    keys = [a.split("=", 1)[0].lstrip("+~") for a in arguments if "=" in a]
    # the parser of Hydra wants flags before keys
    yield from (a for a in arguments if a in SWEEP)
    own = {s for s in SLOTS if f"{s}._target_" in keys and s not in keys}
    yield from (f"{slot}=custom" for slot in sorted(own))
    for argument in arguments:
        key, equals, value = argument.partition("=")
        slot, dot, _ = key.partition(".")
        if argument in SWEEP:
            continue
        added = slot in free and slot not in keys and key != f"{slot}._target_"
        if equals and dot and (slot in own or added):
            yield f"++{argument}"
        elif equals and key in PACKAGED:
            yield f"{PACKAGED[key]}={value}"
        else:
            yield argument


# -- checks before any work ------------------------------------------------------------------------------------------


def _check_all(arguments: list[str], config_name: str, check: Callable[[Config], None]) -> None:
    """Compose and check each job; what Hydra's own flags ask for is left to Hydra."""
    flags = {a for a in arguments if a.startswith("-")}
    if flags - SWEEP:
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # they print, and `--help | head` reads no more than it wants
        return
    overrides = [a for a in arguments if a not in flags]
    with hydra.initialize_config_module("metasam.configs", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        for job in _jobs(overrides, sweep=bool(flags)):
            try:
                config = plain_config(hydra.compose(config_name, job))
            except (HydraException, OmegaConfBaseException, ValueError) as error:
                raise ValueError(_explain(error, loader, config_name, job)) from error
            check(config)


def _parse(overrides: list[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise ValueError(f"expected key=value, got {override!r}")
        try:
            parsed.append(parser.parse_override(override))
        except HydraException as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"cannot read {override!r} ({reason}): quote it, or see Hydra's override grammar"
            ) from error
    return parsed


def _jobs(overrides: list[str], sweep: bool) -> list[list[str]]:
    """The overrides of each job; none if a sweeper is to choose values that are not listed."""
    jobs: list[list[str]] = [[]]
    for override in _parse(overrides):
        values = [str(override.input_line)]
        if sweep and override.is_sweep_override():
            if not (override.is_choice_sweep() or override.is_range_sweep()):
                return []
            values = [f"{override.get_key_element()}={v}" for v in override.sweep_string_iterator()]
        jobs = [[*job, value] for job in jobs for value in values]
    return jobs


def _explain(error: Exception, loader: ConfigLoader, config_name: str, overrides: list[str]) -> str:
    """Hydra's complaint in one line, with the nearest valid option or key."""
    text = str(error)
    if found := re.search(r"Could not (?:find|load) '([^']+)/([^'/]+)'", text):
        group, option = found.groups()
        options = [o for o in loader.get_group_options(group) if o != "custom"]
        return (
            f"expected {group} to be one of {', '.join(options)}, got {group}={option}{did_you_mean(option, options)}"
        )
    parsed = _parse(overrides)
    groups = loader.list_groups("")
    for override in parsed:
        if override.key_or_group in groups and not isinstance(override.value(), str | list):
            options = [o for o in loader.get_group_options(override.key_or_group) if o != "custom"]
            what, value = override.get_key_element(), str(override.input_line).partition("=")[2]
            return (
                f"expected {what} to be one of {', '.join(options)}, got {what}={value}: leave it out for the default"
            )
    selected = [str(o.input_line) for o in parsed if o.key_or_group in groups or o.package]
    known = _keys(plain_config(hydra.compose(config_name, selected))) + groups
    for override in parsed:
        key = override.key_or_group
        if key not in known and not key.startswith("hydra") and not override.is_add() and not override.is_force_add():
            return f"unknown key {key}{did_you_mean(key, known) or '; --help shows all keys'}"
    return " ".join(text.splitlines()[:2]) if text else type(error).__name__


def _keys(config: Config) -> list[str]:
    """All dotted keys, those of inner nodes included."""
    leaves = flatten(config)
    return sorted({".".join(k.split(".")[: i + 1]) for k in leaves for i in range(k.count(".") + 1)})


def plain_config(config: DictConfig) -> Config:
    """The keys of a composed config as a plain dict, references resolved."""
    container = OmegaConf.to_container(config, resolve=True)
    return {str(k): v for k, v in container.items() if k != "hydra"}  # type: ignore[union-attr]
