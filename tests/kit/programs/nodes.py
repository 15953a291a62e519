"""A node of a program: the form that users write, and a plain one for the truth."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]
Function = Callable[[Tensor], Tensor]


class Tape:
    """The random numbers of a program's run: every random node is x * scale + shift."""

    def __init__(self) -> None:
        self.recording = False
        self.entries: list[tuple[Tensor, Tensor]] = []
        self._next = 0

    def record(self, function: Function, x: Tensor) -> None:
        """What ``function`` will do to x, found without consuming the random state."""
        before = torch.get_rng_state()
        with torch.enable_grad():
            own = x.detach().requires_grad_()  # the same strides: numbers are drawn in their order
            y = function(own)
            (scale,) = torch.autograd.grad(y.sum(), own)
        torch.set_rng_state(before)
        self.entries.append((scale, y.detach() - scale * own.detach()))

    def rewind(self) -> None:
        self._next = 0

    def read(self) -> tuple[Tensor, Tensor]:
        self._next += 1
        return self.entries[self._next - 1]


class Run:
    """What a plain run needs beside its weights: the tape, and which examples there are."""

    def __init__(self, tape: Tape, examples: slice = slice(None)) -> None:
        self.tape, self.examples = tape, examples
        tape.rewind()

    def random(self, x: Tensor) -> Tensor:
        scale, shift = self.tape.read()
        return x * scale[self.examples] + shift[self.examples]


class Node(nn.Module):
    """``forward`` is the user's; ``plain`` is right at every order."""

    couples = False
    """Whether examples meet here."""

    def plain(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        raise NotImplementedError


class Pure(Node):
    """Without weights: two spellings of one function."""

    def __init__(self, user: Function, plain: Function) -> None:
        super().__init__()
        self.user, self.elementary = user, plain

    def forward(self, x: Tensor) -> Tensor:
        return self.user(x)

    def plain(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        return self.elementary(x)


class Random(Node):
    """A random function that is elementwise linear once its numbers are drawn."""

    def __init__(self, function: Function, tape: Tape) -> None:
        super().__init__()
        self.function, self.tape = function, tape

    def forward(self, x: Tensor) -> Tensor:
        if self.tape.recording:
            self.tape.record(self.function, x)
        return self.function(x)

    def plain(self, x: Tensor, w: Weights, run: Run) -> Tensor:
        return run.random(x)


def gathered(x: Tensor, dim: int, order: Tensor) -> Tensor:
    """x in another order along a dimension; which one was decided before."""
    return torch.gather(x, dim, order)


def largest(x: Tensor, dim: int) -> Tensor:
    """The maximum along a dimension."""
    return torch.gather(x, dim, x.detach().argmax(dim, keepdim=True)).squeeze(dim)
