"""Independent oracles: the equations as plain loops. Nothing here uses metasam but its draws, a function of a key.

A step is ``step(grad, w, lr, memory) -> w``, one update of SGD: ``grad(point)`` is the gradient at an absolute point,
by name, a constant where there is no graph, ``grad(point, "val")`` that of the validation batch; ``memory`` is a dict
in which a method may keep things between steps, and where another base optimizer than SGD can be put, see `update`.
Where the steps are those of an inner loop, its "place" says so: the number of the meta-step and that of the task.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from metasam import noise

Tree = dict[str, Tensor]
Grad = Callable[..., Tree]
Step = Callable[[Grad, Tree, float, dict[str, Any]], Tree]


def norm(tree: Tree) -> Tensor:
    return torch.cat([v.flatten() for v in tree.values()]).norm()


def dot(a: Tree, b: Tree) -> Tensor:
    return torch.stack([(a[k] * b[k]).sum() for k in a]).sum()


def plus(w: Tree, d: Tree, factor: Any = 1.0) -> Tree:
    return {k: w[k] + factor * d[k] if k in d else w[k] for k in w}


def unit(g: Tree) -> Tree:
    size = norm(g)
    return {k: v / size for k, v in g.items()}


# one step of each method


def plain(grad: Grad, w: Tree, lr: float, memory: dict) -> Tree:
    return update(w, grad(w), lr, memory)


def sam(grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, through: bool = True) -> Tree:
    eps = unit(grad(w))
    if not through:
        eps = {k: v.detach() for k, v in eps.items()}
    return update(w, grad(plus(w, eps, rho)), lr, memory)


def usam(grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float) -> Tree:
    return plus(w, grad(plus(w, grad(w), rho)), -lr)


def _operator(w: Tree, g: Tree, eta: float, only: str) -> Tree:
    return {k: w[k].abs() + eta if only in k.split(".")[-1] else torch.ones_like(g[k]) for k in g}


def _asam_eps(w: Tree, g: Tree, eta: float, only: str) -> Tree:
    t = _operator(w, g, eta, only)
    size = norm({k: t[k] * g[k] for k in g})
    return {k: t[k] ** 2 * g[k] / size for k in g}


def asam(
    grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, eta: float, only: str = "weight", through: bool = True
) -> Tree:
    eps = _asam_eps(w, grad(w), eta, only)
    if not through:
        eps = {k: v.detach() for k, v in eps.items()}
    return plus(w, grad(plus(w, eps, rho)), -lr)


def multistep(
    grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, steps: int, step_size: float | None = None
) -> Tree:
    eps: Tree = {k: torch.zeros_like(v) for k, v in w.items()}
    for _ in range(steps):
        eps = plus(eps, unit(grad(plus(w, eps))), rho * (step_size or 1 / steps))
        if norm(eps) > rho:
            eps = {k: rho * v for k, v in unit(eps).items()}
    return update(w, grad(plus(w, eps)), lr, memory)


def multistep_asam(
    grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, steps: int, step_size: float, eta: float
) -> Tree:
    eps: Tree = {k: torch.zeros_like(v) for k, v in w.items()}
    for _ in range(steps):
        eps = plus(eps, _asam_eps(w, grad(plus(w, eps)), eta, "weight"), rho * step_size)
        t = _operator(w, eps, eta, "weight")
        length = norm({k: eps[k] / t[k] for k in eps})
        if length > rho:
            eps = {k: v * (rho / length) for k, v in eps.items()}
    return plus(w, grad(plus(w, eps)), -lr)


def fisher(grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, eta: float) -> Tree:
    g = grad(w)
    dg = {k: v / (1 + eta * v**2) for k, v in g.items()}
    return update(w, grad(plus(w, dg, rho / dot(g, dg).sqrt())), lr, memory)


def lookbehind(
    grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, steps: int, alpha: float | None = None
) -> Tree:
    g, eps, phi, ways = grad(w), {k: torch.zeros_like(v) for k, v in w.items()}, w, []
    for _ in range(steps):
        eps = plus(eps, unit(g), rho)
        g = grad(plus(w, eps))
        phi = update(phi, g, lr, memory)
        ways.append(plus(phi, w, -1))
    if alpha is not None:
        return plus(w, ways[-1], alpha)
    kept = {}
    for k, way in ways[-1].items():
        lengths = ways[0][k].norm() * way.norm()
        cosine = (ways[0][k] * way).sum() / lengths if lengths > 0 else torch.zeros(())
        kept[k] = w[k] + (cosine + 1) / 2 * way
    return kept


def gsam(grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, alpha: float) -> Tree:
    g = grad(w)
    g_p = grad(plus(w, unit(g), rho))
    g_perp = plus(g, g_p, -dot(g, g_p) / dot(g_p, g_p))
    return update(w, plus(g_p, g_perp, -alpha), lr, memory)


def looksam(grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, k: int, alpha: float) -> Tree:
    t, g = memory.get("step", 0), grad(w)
    memory["step"] = t + 1
    if t % k == 0:
        g_s = grad(plus(w, unit(g), rho))
        memory["g_v"] = plus(g_s, g, -dot(g, g_s) / dot(g, g))
        return update(w, g_s, lr, memory)
    return update(w, plus(g, unit(memory["g_v"]), alpha * norm(g)), lr, memory)


def friendly(grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, sigma: float, lam: float) -> Tree:
    g = grad(w)
    m = memory.get("m")
    d = g if m is None else plus(g, m, -sigma)
    memory["m"] = g if m is None else {k: lam * m[k] + (1 - lam) * g[k] for k in g}
    return update(w, grad(plus(w, unit(d), rho)), lr, memory)


def vasso(grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, theta: float) -> Tree:
    g = grad(w)
    d = memory.get("d")
    memory["d"] = g if d is None else {k: (1 - theta) * d[k] + theta * g[k] for k in g}
    return update(w, grad(plus(w, unit(memory["d"]), rho)), lr, memory)


def wsam(grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, gamma: float, decouple: bool) -> Tree:
    a, g = gamma / (1 - gamma), grad(w)
    g_p = grad(plus(w, unit(g), rho))
    if not decouple:
        return update(w, {k: a * g_p[k] + (1 - a) * g[k] for k in g}, lr, memory)
    return plus(update(w, g, lr, memory), {k: g_p[k] - g[k] for k in g}, -lr * a)


def momentum_sam(grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float) -> Tree:
    memory.setdefault("u", heavy_ball(0.9))
    at = plus(w, unit(memory["v"]), -rho) if "v" in memory else w
    return update(w, grad(at), lr, memory)


def agnostic(
    grad: Grad,
    w: Tree,
    lr: float,
    memory: dict,
    *,
    rho_1: float,
    rho_2: float,
    lookahead: bool = True,
    beta: float = 0.0,
) -> Tree:
    h_v = grad(w, "val")
    if lookahead:
        h_v = grad(plus(w, unit(h_v), rho_2), "val")
    if beta:
        last = memory.get("h_v", h_v)
        h_v = memory["h_v"] = {k: beta * last[k] + (1 - beta) * h_v[k] for k in h_v}
    w_t = plus(plus(w, unit(grad(w)), rho_1), unit(h_v), -rho_2)
    return update(w, grad(w_t), lr, memory)


def draw(like: Tree, memory: dict, seed: int, counter: int) -> Tree:
    """Standard normal numbers; an inner loop's counter is the number of its step as well."""
    place = memory.get("place")
    return noise.normal(like, seed, counter, *(() if place is None else (place[0], counter, place[1])))


def count(memory: dict, name: str) -> int:
    memory[name] = memory.get(name, 0) + 1
    return memory[name] - 1


def filterwise(w: Tree, z: Tree, sigma: float) -> Tree:
    """Noise in proportion to the norm of each row, of a vector as a whole."""
    out = {}
    for k, v in w.items():
        rows = v.reshape(len(v), -1) if v.ndim > 1 else v.reshape(1, -1)
        out[k] = (sigma * rows.norm(dim=1, keepdim=True) * z[k].reshape(rows.shape)).reshape(v.shape)
    return out


def random_sam(
    grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, sigma: float, lam: float, seed: int = 0
) -> Tree:
    delta = filterwise(w, draw(w, memory, seed, count(memory, "draw")), sigma)
    g = grad(plus(w, delta))
    eps = unit({k: lam * g[k] + delta[k] for k in g})
    return update(w, grad(plus(w, eps, rho)), lr, memory)


def rwp(
    grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, alpha: float, second: str = "train", seed: int = 0
) -> Tree:
    g = grad(w)
    g_2 = grad(plus(w, filterwise(w, draw(w, memory, seed, count(memory, "draw")), rho)), second)
    return update(w, {k: (1 - alpha) * g[k] + alpha * g_2[k] for k in g}, lr, memory)


def esam(grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, beta: float, seed: int = 0) -> Tree:
    """With the whole batch selected."""
    g = grad(w)
    z = draw(g, memory, seed, count(memory, "draw"))
    kept = {k: ((1 + torch.erf(v / 2**0.5)) / 2 < beta).to(v) for k, v in z.items()}
    eps = {k: rho / beta * kept[k] * v for k, v in unit(g).items()}
    return update(w, grad(plus(w, eps)), lr, memory)


def ones_at(score: Tree, number: int) -> Tree:
    """Ones at the largest entries over all tensors, found by sorting."""
    entries = sorted(
        ((float(x), k, i) for k, v in score.items() for i, x in enumerate(v.detach().flatten())), key=lambda e: e[0]
    )
    mask = {k: torch.zeros_like(v.detach()) for k, v in score.items()}
    for _, k, i in entries[len(entries) - number :]:
        mask[k].view(-1)[i] = 1
    return mask


def sparse(grad: Grad, w: Tree, lr: float, memory: dict, *, rho: float, sparsity: float, refresh: int) -> Tree:
    """SSAM-F with the squared gradient of the batch for the Fisher information."""
    step, g = count(memory, "step"), grad(w)
    if step % refresh == 0:
        total = sum(v.numel() for v in g.values())
        memory["mask"] = ones_at({k: v**2 for k, v in g.items()}, round((1 - sparsity) * total))
    eps = {k: rho * memory["mask"][k] * v for k, v in unit(g).items()}
    return update(w, grad(plus(w, eps)), lr, memory)


def sparse_dynamic(
    grad: Grad,
    w: Tree,
    lr: float,
    memory: dict,
    *,
    rho: float,
    sparsity: float,
    refresh: int,
    drop: float,
    horizon: int,
    seed: int = 0,
) -> Tree:
    """SSAM-D: of the ones, those with the smallest gradients make room for as many of the zeros."""
    step, g = count(memory, "step"), grad(w)
    if step % refresh == 0:
        z, mask = draw(g, memory, seed, step), memory.get("mask")
        total = sum(v.numel() for v in g.values())
        ones = round((1 - sparsity) * total)
        if mask is None:
            memory["mask"] = ones_at(z, ones)
        else:
            share = drop * 0.5 * (1 + math.cos(math.pi * min(step, horizon) / horizon))
            moves = min(math.floor(share * ones), total - ones)
            kept = ones_at({k: torch.where(mask[k] == 1, v.abs(), -1.0) for k, v in g.items()}, ones - moves)
            grown = ones_at({k: torch.where(mask[k] == 1, -torch.inf, v) for k, v in z.items()}, moves)
            memory["mask"] = {k: kept[k] + grown[k] for k in g}
    eps = {k: rho * memory["mask"][k] * v for k, v in unit(g).items()}
    return update(w, grad(plus(w, eps)), lr, memory)


# updates of base optimizers: SGD, unless the memory holds another as "u"


def update(w: Tree, g: Tree, lr: float, memory: dict) -> Tree:
    return memory["u"](w, g, lr, memory) if "u" in memory else plus(w, g, -lr)


def heavy_ball(mu: float) -> Callable:
    def u(w: Tree, g: Tree, lr: float, memory: dict) -> Tree:
        last = memory.get("v")
        memory["v"] = g if last is None else {k: mu * last[k] + g[k] for k in g}
        return plus(w, memory["v"], -lr)

    return u


def adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Callable:
    def u(w: Tree, g: Tree, lr: float, memory: dict) -> Tree:
        t = memory["t"] = memory.get("t", 0) + 1
        zero = {k: torch.zeros_like(x) for k, x in g.items()}
        v, s = memory.get("v", zero), memory.get("s", zero)
        v = memory["v"] = {k: b1 * v[k] + (1 - b1) * g[k] for k in g}
        s = memory["s"] = {k: b2 * s[k] + (1 - b2) * g[k] ** 2 for k in g}
        return plus(w, {k: v[k] / (1 - b1**t) / ((s[k] / (1 - b2**t)).sqrt() + eps) for k in g}, -lr)

    return u


# gradients of a module


def gradient_of(
    model: nn.Module,
    loss_fn: Callable,
    x: Tensor,
    y: Tensor,
    fixed: Tree | None = None,
    graph: bool = False,
    val: tuple[Tensor, Tensor] | None = None,
) -> Grad:
    """``grad(point)`` of a supervised loss; parameters that the loss does not touch have no key."""
    batches = {"train": (x, y), "val": val}

    def grad(point: Tree, on: str = "train") -> Tree:
        x, y = batches[on]
        with torch.enable_grad():
            leaves = {k: v if v.requires_grad else v.detach().requires_grad_() for k, v in point.items()}
            value = loss_fn(call(model, {**(fixed or {}), **leaves}, x), y)
            found = torch.autograd.grad(value, list(leaves.values()), create_graph=graph, allow_unused=True)
        return {k: g for k, g in zip(leaves, found, strict=True) if g is not None}

    return grad


def call(model: nn.Module, params: Tree, x: Tensor) -> Any:
    """The model at other parameters; its buffers stay as they are."""
    buffers = {k: b.clone() for k, b in model.named_buffers()}
    return functional_call(model, {**params, **buffers}, (x,))


def held_out(support: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The first four fifths of a support set, and the last."""
    held = max(1, len(support[1]) // 5)
    return tuple(t[:-held] for t in support), tuple(t[-held:] for t in support)


# MAML and Sharp-MAML


def query_loss(
    model: nn.Module,
    loss_fn: Callable,
    w: Tree,
    task: Any,
    step: Step,
    lr: float,
    steps: int,
    adapted: set[str],
    first_order: bool = False,
    validates: bool = False,
    place: tuple[int, int] = (0, 0),
) -> Tensor:
    """Adapt to one task with ``steps`` updates, then the loss on its query set."""
    fixed = {k: v for k, v in w.items() if k not in adapted}
    fast = {k: v for k, v in w.items() if k in adapted}
    train, val = held_out(task.support) if validates else (task.support, None)
    grad = gradient_of(model, loss_fn, *train, fixed=fixed, graph=not first_order, val=val)
    memory = {"place": place}
    for _ in range(steps):
        fast = step(grad, fast, lr, memory)
    return loss_fn(call(model, {**fixed, **fast}, task.query[0]), task.query[1])


def meta_gradient(
    model: nn.Module,
    loss_fn: Callable,
    tasks: Any,
    step: Step,
    lr: float,
    steps: int,
    *,
    at: Tree | None = None,
    adapted: set[str] | None = None,
    first_order: bool = False,
    validates: bool = False,
    stream: int = 0,
) -> tuple[Tensor, Tree]:
    """Mean query loss over tasks and its gradient in the parameters (``at``, else the model's own)."""
    free = {k: p for k, p in model.named_parameters() if p.requires_grad}
    w = {k: (at or free)[k].detach().clone().requires_grad_() for k in free}
    frozen = {k: p.detach() for k, p in model.named_parameters() if not p.requires_grad}
    adapted = set(w) if adapted is None else adapted
    singles = tasks.unbind()
    total = sum(
        query_loss(model, loss_fn, {**frozen, **w}, t, step, lr, steps, adapted, first_order, validates, (stream, i))
        for i, t in enumerate(singles)
    ) / len(singles)
    found = torch.autograd.grad(total, list(w.values()), allow_unused=True)
    return total.detach(), {k: torch.zeros_like(w[k]) if g is None else g for k, g in zip(w, found, strict=True)}


def sharp_meta_gradient(
    model: nn.Module, loss_fn: Callable, tasks: Any, step: Step, lr: float, steps: int, *, rho: float, **settings: Any
) -> tuple[Tensor, Tree]:
    """Sharp-MAML's outer step: the meta-gradient at ``w + rho h/||h||``, h the meta-gradient at w."""
    loss, h = meta_gradient(model, loss_fn, tasks, step, lr, steps, **settings)
    w = {k: p.detach() for k, p in model.named_parameters() if k in h}
    return loss, meta_gradient(model, loss_fn, tasks, step, lr, steps, at=plus(w, unit(h), rho), **settings)[1]


def reusing(rho: float, through: bool = True) -> tuple[Step, Step]:
    """SAM as an inner step that notes its eps, and one that goes through the notes again (Sharp-MAML, eq. 14)."""
    notes: list[Tree] = []
    left: list[Tree] = []

    def first(grad: Grad, w: Tree, lr: float, memory: dict) -> Tree:
        eps = {k: rho * v for k, v in unit(grad(w)).items()}
        notes.append({k: v.detach() for k, v in eps.items()})
        return plus(w, grad(plus(w, eps)), -lr)

    def second(grad: Grad, w: Tree, lr: float, memory: dict) -> Tree:
        if not left:
            left.extend(notes)
        return plus(w, grad(plus(w, left.pop(0))), -lr)

    return first, second


# a live two-pass loop, as the usual port of SAM writes it


def two_pass(
    params: list[Tensor], base: torch.optim.Optimizer, closure: Callable[[], Tensor], rho: float, weights: list | None
) -> None:
    """One step of SAM (``weights`` None) or of ASAM by its authors' code (eta 0.01 on ``weights``), in place."""
    base.zero_grad()
    closure()
    with torch.no_grad():
        scaled = []
        for p in params:
            adapts = weights is not None and any(p is w for w in weights)
            t = p.abs().add_(0.01) if adapts else None
            scaled.append((t, p.grad if t is None else t * p.grad))
        size = torch.stack([s.norm() for _, s in scaled]).norm() + 1e-12
        factor = rho / size
        home = [p.clone() for p in params]
        for p, (t, s) in zip(params, scaled, strict=True):
            p.add_((s if t is None else t * s) * factor)
    base.zero_grad()
    closure()
    with torch.no_grad():
        for p, saved in zip(params, home, strict=True):
            p.copy_(saved)
    base.step()
