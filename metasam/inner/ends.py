"""What a graph of autograd ends in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from ..types import Params


def strangers(found: Sequence[Tensor], leaves: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors that need gradients, that ``found`` depend on, and that are none of ``leaves``; each once.

    >>> import torch
    >>> w, s = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True)
    >>> list(strangers([(s * w).sum()], [w]))
    [tensor(1., requires_grad=True)]
    """
    known = {id(v) for v in leaves}
    nodes = {v.grad_fn for v in found if v.grad_fn is not None}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            known.add(id(variable))
            yield variable
        new = {n for n, _ in node.next_functions if n is not None} - nodes
        nodes |= new
        todo += new


class Beside:
    """What a loss has gradients in beside the parameters that it is given, as its first graph shows.

    A loss may have weights of its own, or reach those of the model by itself, in a penalty say.
    """

    def __init__(self) -> None:
        self.found: list[Tensor] | None = None

    def __reduce__(self) -> tuple[type[Beside], tuple[()]]:
        return Beside, ()  # a copy may have another loss

    def look(self, loss: Tensor, leaves: Iterable[Tensor]) -> None:
        """Find them, unless that was done."""
        if self.found is None:
            self.found = list(strangers([loss], leaves))

    def among(self, params: Params) -> Params:
        """Those found, by the names that they have among ``params``, or numbers."""
        if not self.found:  # asked for every job
            return {}
        names = {id(p): k for k, p in params.items()}
        return {names.get(id(t), f"beside {i}"): t for i, t in enumerate(self.found)}
