"""The methods by their papers' names: `SharpnessAware` with one rule each.

All take ``params``, ``base``, ``model`` and the settings of the base as `SAM` documents them, and raise what it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from .. import rules
from ..perturb import Adaptive, Fisher, Unnormalised
from ..rules import Rule, Sharp
from .oracle import Closure
from .sharpness_aware import OPTIONS, SharpnessAware


def build_base(params: Any, base: Any, model: nn.Module | None, settings: Mapping[str, Any]) -> Optimizer:
    """The base optimizer that a named method was asked for.

    Args:
        params: parameters, ``named_parameters()``, param groups, a finished optimizer, or None with ``model``.
        base: optimizer class or factory; ignored for a finished optimizer.
        model: whose parameters to take when ``params`` is None.
        settings: keyword arguments of ``base`` (``lr=...``).

    Raises:
        TypeError: settings beside a finished optimizer, or neither parameters nor a model.
    """
    if isinstance(params, Optimizer):
        if settings:
            raise TypeError(f"expected no settings beside a finished optimizer, got {', '.join(settings)}")
        return params
    if params is None:
        if model is None:
            raise TypeError("expected parameters: model.parameters(), model.named_parameters(), or model=model")
        params = model.named_parameters()
    if isinstance(params, nn.Module):
        raise TypeError("expected parameters, got a module: pass model.parameters(), or model=model")
    made = base(params, **settings)
    if not isinstance(made, Optimizer):
        raise TypeError(f"expected base to make a torch.optim.Optimizer, got {type(made).__name__}")
    return made


Parameters = Optimizer | Iterable[Any] | None


class Named(SharpnessAware):
    """What the named methods share: ``settings`` are the base's, and the options of `SharpnessAware` among them."""

    def __init__(self, rule: Rule, params: Parameters, base: Any, model: nn.Module | None, settings: Any) -> None:
        options = {k: settings.pop(k) for k in OPTIONS if k in settings}
        super().__init__(build_base(params, base, model, settings), rule, model=model, **options)


class SAM(Named):
    """Sharpness-Aware Minimization (Foret et al. 2021): ``u(grad L(w + rho g/||g||))``; 2 gradient evaluations a step.

    Args:
        params: ``model.parameters()``, ``model.named_parameters()``, param groups (with their own ``lr`` and ``rho`` if
            wanted), or a finished optimizer: ``SAM(torch.optim.Adam(...), rho=0.05)``.
        base: class of the base optimizer.
        rho: radius; 0.05 suits CIFAR-10 and ImageNet, 0.1 CIFAR-100 (paper).
        steps: ascent steps; more than one is multi-step SAM.
        m: examples that share an eps (m-SAM; 1 is 1-SAM): the closure must take parts, ``closure(part=None)``, return
            the losses ``[B]`` of ``x[part]`` and leave backward to the step. None: the whole batch.
        normalise: False is USAM, ``eps = rho g``, whose rho is not comparable.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.

    Raises:
        TypeError: see `SharpnessAware`.
        ValueError: a negative or non-finite rho, or steps < 1.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.05,
        steps: int = 1,
        m: int | None = None,
        normalise: bool = True,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        rule = Sharp(rho, steps=steps, m=m) if normalise else Sharp(rho, Unnormalised(), steps=steps, m=m)
        super().__init__(rule, params, base, model, settings)


class ASAM(Named):
    """Adaptive SAM (Kwon et al. 2021): ``eps = rho T^2 g/||T g||``, ``T = |w| + eta``; 2 gradient evaluations a step.

    Args:
        params: as in `SAM`; parameters need names here (``named_parameters()`` or ``model=``) unless ``only=None``.
        base: class of the base optimizer.
        rho: radius; 0.5 for CIFAR-10, 1.0 for CIFAR-100 (paper).
        eta: stabiliser of T.
        only: adapt parameters whose own name contains this, "weight" as the authors do; None adapts all. What
            ``torch.nn.utils.parametrizations`` (``weight_norm``) make of a weight is named ``original0``, ``original1``
            and is not adapted by "weight", but by "original" (not beside weights of other layers) or None.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.

    Raises:
        TypeError: see `SharpnessAware`.
        ValueError: a negative or non-finite rho or eta, or no parameter to adapt (unnamed ones, for instance).
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.5,
        eta: float = 0.01,
        only: str | None = "weight",
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(Sharp(rho, Adaptive(eta, only)), params, base, model, settings)


class MultiStepSAM(Named):
    """SAM with several ascent steps (Foret et al. 2021, appendix C.6): ``steps + 1`` gradient evaluations a step.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer.
        rho: radius of the ball that the ascent stays in.
        steps: ascent steps.
        step_size: length of one as a fraction of rho; None: ``1/steps``. A longer one is projected back onto the ball.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.05,
        steps: int = 2,
        step_size: float | None = None,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(Sharp(rho, steps=steps, step_size=step_size), params, base, model, settings)


class FisherSAM(Named):
    """Fisher-SAM (Kim et al. 2022): ``eps = rho D g / sqrt(g . D g)``, ``D = 1/(1 + eta g^2)``; 2 gradient evaluations.

    Its ellipsoid depends on the scale of the loss: unscale gradients before, and tune rho and eta together.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer.
        rho: radius, the paper's gamma.
        eta: how much the Fisher information shrinks a direction; 0 is SAM.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.1,
        eta: float = 1.0,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(Sharp(rho, Fisher(eta)), params, base, model, settings)


class LookbehindSAM(Named):
    """Lookbehind (Mordido et al. 2024), see `metasam.rules.Lookbehind`; ``steps + 1`` gradient evaluations a step.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer; its momentum advances ``steps`` times a step.
        rho: length of one ascent step.
        steps: the paper's k.
        keep: the paper's alpha, how much of the way to keep; None: adaptive, by tensor.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.05,
        steps: int = 2,
        keep: float | None = 0.5,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(rules.Lookbehind(rho, steps, keep), params, base, model, settings)


class LookSAM(Named):
    """LookSAM (Liu et al. 2022), see `metasam.rules.LookSAM`; ``1 + 1/every`` gradient evaluations a step.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer.
        rho: radius.
        every: the paper's k.
        reuse: the paper's alpha.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.05,
        every: int = 5,
        reuse: float = 0.7,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(rules.LookSAM(rho, every, reuse), params, base, model, settings)


class GSAM(Named):
    """Surrogate gap guided SAM (Zhuang et al. 2022), see `metasam.rules.GSAM`; 2 gradient evaluations a step.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer.
        rho: radius.
        gap: the paper's alpha; 0 is SAM.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.05,
        gap: float = 0.4,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(rules.GSAM(rho, gap), params, base, model, settings)


class FriendlySAM(Named):
    """Friendly-SAM (Li et al. 2024), see `metasam.rules.FriendlySAM`; 2 gradient evaluations a step.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer.
        rho: radius.
        sigma: how much of the running mean gradient to take out of the ascent direction; 0 is SAM.
        decay: the paper's lambda.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.05,
        sigma: float = 1.0,
        decay: float = 0.9,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(rules.FriendlySAM(rho, sigma, decay), params, base, model, settings)


class VaSSO(Named):
    """VaSSO (Li & Giannakis 2023), see `metasam.rules.VaSSO`; 2 gradient evaluations a step.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer.
        rho: radius.
        theta: weight of the newest gradient in the ascent direction; 1 is SAM.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.05,
        theta: float = 0.9,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(rules.VaSSO(rho, theta), params, base, model, settings)


class MomentumSAM(Named):
    """Momentum-SAM (Becker et al. 2024), see `metasam.rules.MomentumSAM`; 1 gradient evaluation a step.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer, one with momentum.
        rho: radius.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.

    Raises:
        ValueError: at the second step, the base keeps no momentum.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.3,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(rules.MomentumSAM(rho), params, base, model, settings)


class WSAM(Named):
    """WSAM (Yue et al. 2023), see `metasam.rules.WSAM`; 2 gradient evaluations a step.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer.
        rho: radius.
        gamma: weight of sharpness; 0.5 is SAM where coupled.
        decouple: keep the sharpness term out of the base optimizer's momentum and preconditioner.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.05,
        gamma: float = 0.9,
        decouple: bool = True,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(rules.WSAM(rho, gamma, decouple), params, base, model, settings)


class AgnosticSAM(Named):
    """Agnostic-SAM (Nguyen et al. 2024), see `metasam.rules.Agnostic`; 2 gradient evaluations, 2 of validation data.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer.
        rho_train: radius of the ascent on the training loss; twice ``rho_val`` in the paper.
        rho_val: radius of the descent on the validation loss; 0.05 for CIFAR-10, 0.1 for CIFAR-100 in the paper.
        lookahead: take the validation gradient at its own perturbed point (the first paper); False is the cheaper
            printed form, with 1 evaluation of the validation batch.
        val_momentum: weight of the past in a running mean of the validation gradient, which begins at the first one.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho_train: float = 0.1,
        rho_val: float = 0.05,
        lookahead: bool = True,
        val_momentum: float = 0.0,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(rules.Agnostic(rho_train, rho_val, lookahead, val_momentum), params, base, model, settings)

    def step(
        self,
        closure: Closure | None = None,
        val_closure: Closure | None = None,
        *,
        scaler: GradScaler | None = None,
        **others: Closure,
    ) -> Any:
        """One step; returns the training loss at the undisplaced weights, detached.

        Args:
            closure: evaluates the training batch and calls backward.
            val_closure: the same for a validation batch, held out or drawn again from the training set.
            scaler: see `SharpnessAware.step`.
            others: closures by name; ``val=`` is ``val_closure=``.

        Raises:
            TypeError: a closure is missing, or the validation closure came twice; see `SharpnessAware.step`.
        """
        if val_closure is not None and "val" in others:
            raise TypeError("expected one validation closure, got both val_closure and val=")
        if val_closure is not None:
            others["val"] = val_closure
        elif closure is not None and "val" not in others:
            raise TypeError("expected step(closure, val_closure), got no val_closure: it evaluates a validation batch")
        return self._step(closure, scaler, others)


class RandomSAM(Named):
    """R-SAM (Liu et al. 2022), see `metasam.rules.RandomSAM`; 2 gradient evaluations a step.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer.
        rho: radius.
        sigma: size of the noise relative to each output filter.
        pull: the paper's lambda, weight of the gradient beside the noise.
        noise_seed: of the noise.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.05,
        sigma: float = 5e-4,
        pull: float = 2.0,
        noise_seed: int = 0,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(rules.RandomSAM(rho, sigma, pull, noise_seed), params, base, model, settings)


class RWP(Named):
    """Random weight perturbation (Li et al. 2024), see `metasam.rules.RWP`; 2 gradient evaluations a step.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer.
        rho: size of the noise relative to each output filter, the paper's gamma.
        mix: the paper's alpha, weight of the perturbed gradient.
        second: "train", both gradients of one batch, or "val", of another: ``step(closure, val=other_closure)``.
        noise_seed: of the noise.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.01,
        mix: float = 0.5,
        second: str = "train",
        noise_seed: int = 0,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(rules.RWP(rho, mix, second, noise_seed), params, base, model, settings)


class ESAM(Named):
    """ESAM (Du et al. 2022), see `metasam.rules.ESAM`; ``1 + select`` gradient evaluations and a forward a step.

    With ``select < 1`` the closure must take parts, see ``m`` of `SAM`.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer.
        rho: radius.
        keep: the paper's beta, the share of weights that eps moves.
        select: the paper's gamma, the share of the batch to descend on.
        noise_seed: of the masks.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.05,
        keep: float = 0.6,
        select: float = 0.5,
        noise_seed: int = 0,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(rules.ESAM(rho, keep, select, noise_seed), params, base, model, settings)


class SparseSAM(Named):
    """Sparse SAM (Mi et al. 2022), see `metasam.rules.SparseSAM`; 2 gradient evaluations a step.

    With ``criterion="fisher"`` and ``samples > 0`` the closure must take parts, see ``m`` of `SAM`.

    Args:
        params: as in `SAM`.
        base: class of the base optimizer.
        rho: radius.
        sparsity: share of weights that eps leaves alone; 0 is SAM.
        criterion: "fisher" (SSAM-F) or "dynamic" (SSAM-D).
        refresh: steps between two masks.
        samples: examples for the Fisher information; 0 squares the gradient of the batch.
        drop: largest share of the mask that "dynamic" replaces.
        horizon: steps until it replaces nothing any more.
        noise_seed: of the random choices.
        model: see `SharpnessAware`.
        settings: keyword arguments of ``base``, and the options of `SharpnessAware`.
    """

    def __init__(
        self,
        params: Parameters = None,
        base: Callable[..., Optimizer] = torch.optim.SGD,
        *,
        rho: float = 0.05,
        sparsity: float = 0.5,
        criterion: str = "fisher",
        refresh: int = 100,
        samples: int = 16,
        drop: float = 0.5,
        horizon: int = 10_000,
        noise_seed: int = 0,
        model: nn.Module | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            rules.SparseSAM(rho, sparsity, criterion, refresh, samples, drop, horizon, noise_seed),
            params,
            base,
            model,
            settings,
        )
