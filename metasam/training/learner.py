"""What a trainer asks of the thing that it trains; `FewShot` and `Supervised` are the two there are."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

from torch.optim import Optimizer

from ..configure import Config


class Step(NamedTuple):
    """What one step saw, at the undisplaced weights; accuracy is None for regression."""

    loss: float
    accuracy: float | None
    skipped: bool
    """Whether nothing was updated because a gradient was not finite."""


class Measured(NamedTuple):
    """The number that weights are judged by: its name, mean, half width of the 95% interval, and how many it is of."""

    quantity: str
    value: float
    half: float
    n: int


class Words(NamedTuple):
    """How pictures call things."""

    train: str
    validation: str
    quantity: str
    """What the accuracy or the loss is of; the rest of the axis' label."""


class Learner(Protocol):
    """Something that trains step by step, is judged, and has a state.

    Attributes:
        words: for pictures.
        unit: of ``gradient_evaluations``, after a number.
        judges_last: whether the last weights are measured too, beside the best.
    """

    words: ClassVar[Words]
    unit: ClassVar[str]
    judges_last: ClassVar[bool]

    @property
    def optimizer(self) -> Optimizer:
        """Its param groups hold the learning rates."""
        ...

    @property
    def gradient_evaluations(self) -> float:
        """What training has cost so far, in the learner's unit."""
        ...

    @property
    def counts(self) -> dict[str, float]:
        """The evaluations that make it up."""
        ...

    @property
    def skipped(self) -> int:
        """Steps that updated nothing because a gradient was not finite."""
        ...

    def step(self, number: int) -> Step:
        """Train on batch ``number``; the same number is the same batch in any process."""
        ...

    def validate(self) -> Measured | None:
        """Judge the weights on validation data; None if there are none."""
        ...

    def has(self, split: str) -> bool:
        """Whether there are data of this split."""
        ...

    def judged(self, split: str) -> int:
        """How many tasks (or examples) the end of a run evaluates; `Measured.n` is the like of a validation."""
        ...

    def measure(self, split: str) -> dict[str, Any]:
        """Judge the weights for the results: ``accuracy`` or ``loss``, ``ci95``, ``n``, ``over``, ..."""
        ...

    def congruence(self, tasks: int) -> dict[str, float]:
        """Whether the gradients of training and validation agree: ``congruence``, ``congruence_dot``.

        Empty without validation data. Nothing that training depends on changes.

        Args:
            tasks: how many tasks (supervised: batches of examples) of each split, always the same ones.
        """
        ...

    def sharpness(self, split: str, *, rho: float, samples: int, tasks: int) -> dict[str, Any]:
        """How sharp the training loss is around the weights, see `metasam.training.diagnose.around`.

        Args:
            split: where tasks to adapt to come from.
            rho: radius of the ball.
            samples: displacements that an average is over.
            tasks: as for `congruence`.
        """
        ...

    def state_dict(self, *, slim: bool = False) -> dict[str, Any]:
        """What a checkpoint holds of the learner; a slim one is enough to use the weights, not to continue."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave.

        Raises:
            RuntimeError, ValueError, KeyError: it is of another model or optimizer.
        """
        ...

    def load_weights(self, state: dict[str, Any]) -> None:
        """Take the weights alone out of what `state_dict` gave, slim or not."""
        ...

    def facts(self) -> dict[str, Any]:
        """What else belongs into the results, such as the engine that was used."""
        ...

    def title(self, config: Config) -> str:
        """Heading of pictures."""
        ...
