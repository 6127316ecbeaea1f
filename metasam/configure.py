"""Build objects from nested mappings: as much of Hydra's ``_target_`` convention as it takes to read a run again."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

Config = dict[str, Any]


def locate(path: str) -> Any:
    """Import the object at a dotted path, as ``torch.optim.Adam`` or ``my_module.Net``.

    >>> locate("collections.OrderedDict").__name__
    'OrderedDict'

    Raises:
        ValueError: no module of that name, or the module has no such attribute; the message suggests the nearest.
    """
    parts = path.split(".") if isinstance(path, str) else []
    if len(parts) < 2 or not all(parts):
        raise ValueError(f"expected a dotted path such as 'my_module.Net', got {path!r}")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # a module that exists but imports something missing is that module's problem: say so
            if error.name is not None and not (name + ".").startswith(error.name + "."):
                raise ValueError(f"cannot import {name!r} for {path!r}: {error}") from error
            continue
        for attribute in parts[cut:]:
            try:
                found = getattr(found, attribute)
            except AttributeError:
                owner = getattr(found, "__name__", name)
                raise ValueError(f"{owner!r} has no {attribute!r}{did_you_mean(attribute, dir(found))}") from None
        return found
    raise ValueError(f"no module named {parts[0]!r} for {path!r}; is it installed, or in the current directory?")


def did_you_mean(word: str, known: Any) -> str:
    """End of an error message: the nearest known word, or nothing.

    >>> did_you_mean("samm", ["asam", "sam", "plain"])
    "; did you mean 'sam'?"
    """
    near = difflib.get_close_matches(word, [str(k) for k in known], n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def instantiate(node: Any, /, **extra: Any) -> Any:
    """Build what ``node`` describes, inner nodes first.

    A mapping with ``_target_`` becomes a call of that object with the other keys as arguments, or a
    ``functools.partial`` of it with ``_partial_: true``. Other mappings, lists and values are returned as they are,
    with the nodes inside them built.

    Args:
        node: plain nested mapping, list or value, for instance from a YAML file.
        **extra: further arguments of the outermost target; they win over the node's own.

    >>> instantiate({"_target_": "fractions.Fraction", "numerator": 1}, denominator=3)
    Fraction(1, 3)
    >>> half = instantiate({"_target_": "fractions.Fraction", "_partial_": True, "denominator": 2})
    >>> half(3)
    Fraction(3, 2)

    Raises:
        ValueError: the target cannot be found, does not take the arguments, or refused them (TypeError and OSError: it
            raised that); the message names the key of the node and the target.
    """
    return _build(node, "", extra)


def _build(node: Any, key: str, extra: Mapping[str, Any]) -> Any:
    if isinstance(node, Mapping):
        built = {
            k: v if k in ("_target_", "_partial_") else _build(v, f"{key}.{k}" if key else str(k), {})
            for k, v in node.items()
        }
        if "_target_" not in node:
            return built
        return _call(built.pop("_target_"), built.pop("_partial_", False), {**built, **extra}, key)
    if isinstance(node, list | tuple):
        return [_build(v, f"{key}[{i}]", {}) for i, v in enumerate(node)]
    return node


def _call(path: str, partial: bool, arguments: Config, key: str) -> Any:
    with naming(key, path, arguments):
        target = locate(path)
        if not callable(target):
            raise ValueError(f"expected something to call, got {type(target).__name__}")
        _check_arguments(target, arguments, partial)
        return functools.partial(target, **arguments) if partial else target(**arguments)


@contextmanager
def naming(key: str, path: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Within: errors of a call of ``path`` begin with the key of its node, and name an argument of the wrong kind.

    TypeError and OSError keep their type, the others become ValueError.
    """
    try:
        yield
    except (ValueError, TypeError, RuntimeError, ArithmeticError, AttributeError, OSError) as error:
        where = f"{key}: {path}" if key else path
        message = f"{where}: {_suspect(path, arguments, error)}{str(error) or type(error).__name__}"
        kind = next(k for k in type(error).__mro__ if k.__module__ == "builtins")  # takes a message alone
        raise (kind if issubclass(kind, TypeError | OSError) else ValueError)(message) from error


def _suspect(path: str, arguments: Mapping[str, Any], error: Exception) -> str:
    """Which argument is of another kind than its default, unless the error speaks of it already."""
    if not isinstance(error, TypeError | AttributeError):
        return ""
    try:
        defaults = {k: p.default for k, p in inspect.signature(locate(path)).parameters.items()}
    except (TypeError, ValueError):
        return ""
    for name, value in arguments.items():
        default = defaults.get(name)
        wanted, got = _kind(default), "nothing" if value is None else _kind(value)
        if name not in str(error) and wanted and got and wanted != got:
            return f"expected {name} to be like {default!r}, got {name}={value!r}: "
    return ""


def _kind(value: Any) -> str | None:
    """What kind of value it is in a config; None: nobody can tell."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "number"
    return "list" if isinstance(value, Sequence) else None


def _check_arguments(target: Callable[..., Any], arguments: Config, partial: bool) -> None:
    names, open_ended = parameters(target)
    unknown = [] if open_ended else [k for k in arguments if k not in names]
    if unknown:
        takes = ", ".join(names) or "none"
        raise ValueError(f"takes no argument {unknown[0]!r}{did_you_mean(unknown[0], names)} (it takes: {takes})")
    missing = [k for k, required in names.items() if required and k not in arguments]
    if missing and not partial:
        raise ValueError(f"needs the argument {missing[0]!r}")


def parameters(target: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """The named parameters of a callable, each with whether it is required, and whether it takes any ``**keyword``.

    >>> parameters(lambda a, b=1, *, c: 0)
    ({'a': True, 'b': False, 'c': True}, False)
    """
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some built-ins have none
        return {}, True
    named = {
        p.name: p.default is p.empty
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    return named, any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def offer(node: Mapping[str, Any], **offered: Any) -> Config:
    """The node with those of the offered arguments that its target names and that it does not set itself.

    This is how a network learns the number of classes and a task family the number of ways, whoever wrote it: it
    names the argument, or does not.

    >>> offer({"_target_": "fractions.Fraction", "numerator": 1}, denominator=3, ways=5)
    {'_target_': 'fractions.Fraction', 'numerator': 1, 'denominator': 3}
    """
    names, _ = parameters(locate(node["_target_"]))
    return {**node, **{k: v for k, v in offered.items() if k in names and k not in node}}


def flatten(node: Mapping[str, Any], prefix: str = "") -> Config:
    """Dotted keys of a nested mapping.

    >>> flatten({"inner": {"lr": 0.4, "steps": 1}, "seed": 1})
    {'inner.lr': 0.4, 'inner.steps': 1, 'seed': 1}
    """
    flat: Config = {}
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def plain(value: Any) -> Any:
    """Mappings and sequences as plain dicts and lists, so that YAML and ``torch.load(weights_only=True)`` take them.

    >>> plain({"shape": (1, 28, 28)})
    {'shape': [1, 28, 28]}
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"expected a plain value (number, text, list, mapping) in a config, got {type(value).__name__}")
