"""Who may import whom, read off the source; and that ``import metasam`` needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = {"metasam": "metasam", "tasks": "metasam.tasks", "configs": "metasam.configs", "scripts": "metasam.scripts"}

MAY_IMPORT = {
    "errors": set(),
    "types": set(),
    "configure": set(),
    "models": set(),
    "checkpoint": {"errors"},
    "functional": set(),
    "shards": set(),
    "noise": {"types", "shards"},
    "ranks": {"types", "noise", "errors"},
    "batchnorm": set(),
    "tree": {"types", "shards"},
    "perturb": {"types", "tree"},
    "rules": {"types", "tree", "perturb", "shards"},
    "optim": {"types", "tree", "perturb", "rules", "batchnorm", "noise", "shards", "ranks"},
    "inner": {"types", "tree", "perturb", "rules", "batchnorm", "noise", "functional", "errors"},
    "meta": {
        "types",
        "tree",
        "perturb",
        "rules",
        "batchnorm",
        "optim",
        "inner",
        "configure",
        "checkpoint",
        "ranks",
        "functional",
    },
    "diagnostics": {"types", "tree", "perturb", "batchnorm", "noise", "shards", "functional"},
    "tasks": {"types"},
    "training": {
        "types",
        "errors",
        "diagnostics",
        "meta",
        "optim",
        "configure",
        "checkpoint",
        "tasks",
        "ranks",
        "functional",
    },
    "scripts": {
        "types",
        "meta",
        "inner",
        "configure",
        "checkpoint",
        "tasks",
        "training",
        "models",
        "rules",
        "ranks",
        "__init__",
    },
    "configs": set(),
    "__init__": {"types", "rules", "optim", "meta"},
}
"""Parts of metasam and the other parts that each may import, at any depth of its own folder."""

OUTSIDE = {
    "higher": {"metasam/inner/higher.py", "scripts/bench/peers.py"},
    **{peer: {"scripts/bench/peers.py"} for peer in ("learn2learn", "torchopt", "pytorch_optimizer", "easyfsl")},
    "hydra": "scripts/",
    "omegaconf": "scripts/",
    "yaml": {"metasam/training/folder.py"},
}
"""Other packages with a place of their own: those files, or that folder."""


def sources():
    for folder in TREES:
        yield from sorted((ROOT / folder).rglob("*.py"))


def module_name(path):
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([TREES[folder], *(rest[:-1] if rest[-1] == "__init__" else rest)])


def imported(path):
    """Full names of everything that a file imports, wherever in it, for type checking too."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def part(name):
    """``metasam.inner.vmap`` belongs to ``inner``; ``metasam`` itself, and names that it exports, to ``__init__``."""
    pieces = name.split(".")
    return pieces[1] if len(pieces) > 1 and pieces[1] in MAY_IMPORT else "__init__"


@pytest.mark.parametrize("path", list(sources()), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports(path):
    me, file = part(module_name(path)), path.relative_to(ROOT).as_posix()
    for name in imported(path):
        top = name.split(".")[0]
        if top == "metasam":
            assert part(name) in {me, *MAY_IMPORT[me]}, f"{file} imports {name}: {me} may import {MAY_IMPORT[me]}"
        assert top not in {"tasks", "configs", "scripts"}, f"{file} imports {top}: import metasam.{top}"
        place = OUTSIDE.get(top, file)
        allowed = file.startswith(place) if isinstance(place, str) else file in place
        assert allowed, f"{file} imports {top}, whose only place is {place}"


def test_the_reader_sees_imports():
    """The test above would pass on an empty list."""
    names = set(imported(ROOT / "metasam/training/trainer.py"))
    assert {"metasam.checkpoint", "metasam.configure.flatten", "torch"} <= names
    assert "higher" in {n.split(".")[0] for n in imported(ROOT / "metasam/inner/higher.py")}


def test_metasam_needs_torch_alone():
    code = """
import sys
blocked = ["higher", "numpy", "hydra", "omegaconf", "yaml", "matplotlib", "rich", "tensorboard", "PIL", "torchvision",
           "learn2learn", "scipy", "pandas", "sklearn"]
sys.modules.update(dict.fromkeys(blocked))  # None: importing it raises ModuleNotFoundError
import metasam
import torch
model = torch.nn.Linear(2, 1)
assert metasam.SAM and metasam.ASAM and metasam.SharpnessAware and metasam.SharpMAML and metasam.types.Task
maml = metasam.SharpMAML(model, torch.nn.functional.mse_loss, inner_lr=0.1, inner_steps=1, variant="both")
x, y = torch.randn(4, 10, 2), torch.randn(4, 10, 1)
maml.step(metasam.types.Task(support=(x, y), query=(x, y)), torch.optim.SGD(model.parameters(), lr=0.1))
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
