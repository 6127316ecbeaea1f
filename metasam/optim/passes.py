"""Steps without a closure: the caller makes the evaluations, in a loop of its own.

Rules are pure and evaluate before they descend. So a rule is run on the evaluations that are known; where it asks for
one that is not, that is the caller's next pass; and once it would descend, every evaluation is known.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from .. import tree
from ..rules import Rule
from ..types import Eval, Params, Part
from .foreign import is_piled_up
from .oracle import LiveDescent, LiveOracle

if TYPE_CHECKING:
    from .sharpness_aware import SharpnessAware


class _Ask(Exception):  # noqa: N818
    """An evaluation that is not known yet."""

    def __init__(self, eps: Params | None, on: str, local: bool) -> None:
        self.eps, self.on, self.local = eps, on, local


class _Descends(Exception):  # noqa: N818
    """There is nothing left to evaluate."""


class _Halt(LiveDescent):
    """A descent that is not taken."""

    def __call__(self, params: Params, grads: Params) -> Params:
        raise _Descends


class Passes(LiveOracle):
    """`metasam.types.Oracle` of the evaluations so far; `passes` makes those that a rule asks for beyond them."""

    def __init__(self, optimizer: WithoutClosure, live: Params, scaler: GradScaler | None) -> None:
        super().__init__(cast("SharpnessAware", optimizer), live, {}, scaler)
        self.known: list[Eval] = []
        self.used = 0
        self.complete = False

    def __call__(
        self,
        eps: Params | None = None,
        on: str = "train",
        *,
        part: Part | None = None,
        local: bool = False,
        grad: bool = True,
        graph: bool = True,
    ) -> Eval:
        if part is not None or not grad:
            raise TypeError(
                f"{self.optimizer.rule} evaluates parts of a batch or the losses of its examples, which a loop over "
                "passes cannot give: call step(closure) with a closure(part=None)"
            )
        if self.complete and self.used == len(self.known):
            raise TypeError(f"{self.optimizer.rule} evaluates after it has descended: call step(closure)")
        if self.used == len(self.known):
            raise _Ask(eps, on, local)
        self.used += 1
        return self.known[self.used - 1]

    @torch.no_grad()
    def wanted(self) -> tuple[Params | None, str, bool] | None:
        """Displacement and stream of the next evaluation, and whether it is local; None when there is none left."""
        rule, params, state = self.optimizer.prepared(self.live)
        self.used = 0
        try:
            with tree.fused():
                rule(self, _Halt(self.optimizer.base, self.live, self), params, state)
        except _Ask as ask:  # its traceback holds this frame: not to be kept in it
            return ask.eps, ask.on, ask.local
        except _Descends:
            pass
        self.used, self.complete = 0, True
        return None

    def passes(self) -> Generator[str, None, None]:
        """Each evaluation that is wanted, by its stream; whoever iterates calls backward in it."""
        while (wanted := self.wanted()) is not None:
            eps, on, local = wanted
            with self.around(eps, on, local=local):
                yield on
                self.answered(on)

    def answered(self, on: str) -> None:
        """Take the gradients of the evaluation that has been made. Its loss nobody told us."""
        self.known.append(self.answer(on, None, torch.tensor(float("nan")), None, True))


class WithoutClosure(Optimizer):
    """The part of `SharpnessAware` for training loops that have no closure."""

    base: Optimizer
    rule: Rule
    same_noise: bool
    _live: Callable[[], Params]

    _open: Generator[str, None, None] | None = None  # the passes of a step that is not over
    _phase: Passes | None = None  # its oracle, if first_step began it

    def passes(self, *, scaler: GradScaler | None = None) -> Iterator[str]:
        """One step as a loop over its gradient evaluations, for training loops that have no closure.

        >>> import torch
        >>> from metasam import SAM
        >>> w = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = SAM([w], lr=0.1)
        >>> for on in optimizer.passes():
        ...     w.square().sum().backward()

        ``on`` says whose loss to call backward on: "train", the same batch in every pass, or "val". The weights are
        displaced within the body, and the update has been made when the loop is over. Leaving it early, by ``break``
        or by an exception, abandons the step and puts the weights back bit for bit. (An iterator that is kept in a
        variable abandons it when it is closed, or by `restore`.)

        Args:
            scaler: of float16 autocast: ``scaler.scale(loss).backward()`` in the body, ``scaler.update()`` after the
                loop, as in ``step(closure, scaler=scaler)``.

        Raises:
            TypeError: the rule wants losses of single examples, or parts of a batch: it needs ``step(closure)``.
            RuntimeError: an earlier step is not over.
        """
        self._expect_no_pass("passes()")
        self.base.zero_grad()
        at = Passes(self, self._live(), scaler)
        self._open = passes = at.passes()
        try:
            yield from passes
            restored = self._open is not passes
        finally:
            passes.close()
            if self._open is passes:
                self._open = None
        if not restored:
            self.step(at, val=at)  # type: ignore[call-overload]

    def first_step(self, zero_grad: bool = False, *, scaler: GradScaler | None = None) -> None:
        """Displace the weights along the gradients that ``loss.backward()`` left; `second_step` takes the step.

            loss_fn(model(x), y).backward()
            optimizer.first_step()
            loss_fn(model(x), y).backward()
            optimizer.second_step(zero_grad=True)

        For rules that evaluate the training batch twice, first at the weights as they are. BatchNorm statistics are
        those of the first evaluation, without any switching by hand. Data-parallel workers climb globally, since the
        first backward has been synchronised by then; around it, ``model.no_sync()`` makes it local.

        Args:
            zero_grad: accepted for the usual signature; the gradients are taken either way.
            scaler: as in `passes`; both losses are scaled, and ``scaler.update()`` follows `second_step`.

        Raises:
            RuntimeError: an earlier step is not over, or its gradients were not cleared; the rule makes other
                evaluations than these two; or ``same_noise``, which has to know where the first of them began.
        """
        self._expect_no_pass("first_step()")
        if self.same_noise:
            raise RuntimeError("same_noise=True needs to see the first evaluation: write passes() or step(closure)")
        if is_piled_up(self):
            raise RuntimeError(
                "expected the gradients of this batch alone; they came on top of those that the last step left: call "
                "optimizer.zero_grad() before backward, or second_step(zero_grad=True)"
            )
        at = Passes(self, self._live(), scaler)
        wanted = at.wanted()
        if wanted is not None and not wanted[0] and wanted[1] == "train":
            at.counted = at.workers.blind = True  # it has happened already
            at.answered("train")
            passes = at.passes()
            if next(passes, None) == "train":
                self._open, self._phase = passes, at
                return
            passes.close()
        raise RuntimeError(self._not_two())

    def second_step(self, zero_grad: bool = False) -> None:
        """Put the weights back and update them along the gradients at the displaced ones.

        Args:
            zero_grad: clear the gradients afterwards.

        Raises:
            RuntimeError: there was no `first_step`, or the rule wants more than two evaluations.
        """
        at, passes = self._phase, self._open
        if at is None or passes is None:
            raise RuntimeError("expected first_step() before second_step(): loss.backward(), first_step(), and again")
        self._open = self._phase = None
        if next(passes, None) is not None:
            passes.close()
            raise RuntimeError(self._not_two())
        self.step(at, val=at)  # type: ignore[call-overload]
        if zero_grad:
            self.zero_grad()

    def restore(self) -> None:
        """Abandon a step that `first_step` or an iterator of `passes` began: the weights are back bit for bit."""
        passes, self._open, self._phase = self._open, None, None
        if passes is not None:
            passes.close()

    def _expect_no_pass(self, what: str) -> None:
        if self._open is not None:
            began, rest = ("passes()", "finish the loop") if self._phase is None else ("first_step()", "second_step()")
            raise RuntimeError(
                f"{what} in the middle of a step, which {began} began and whose weights are displaced: {rest}, or "
                "give it up with restore()"
            )

    def _not_two(self) -> str:
        return (
            f"expected a rule that evaluates the training batch twice, first at the weights as they are; {self.rule} "
            "does not in this step: write `for on in optimizer.passes(): ...` or step(closure)"
        )
