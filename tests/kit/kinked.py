"""Functions with kinks, put into a small network: what the cases of ``kinks_*.py`` share.

A case is a function ``f(z)`` of a hidden layer z, in every spelling that reaches a function mode as
another object. Where autograd has no second derivative, ``truth`` is the same function composed of
operations that have one.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROW, LINE, IMAGE, VOLUME = (6, 40), (4, 3, 20), (3, 3, 6, 6), (2, 3, 4, 4, 4)


@dataclass(frozen=True)
class Kink:
    id: str
    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...] = ROW
    truth: Callable[[Tensor], Tensor] | None = None
    crosses: bool = True
    """Whether a coarse step crosses a kink, so that without its rule the case must go wrong."""

    @property
    def operator(self) -> str:
        """Its row in the support matrix: one for all spellings."""
        name = self.id.split("-")[0].split(".")[-1].rstrip("_").lower()
        return name.replace("maxpool", "max_pool")

    @property
    def own_truth(self) -> str:
        """The same, where nested autograd can differentiate the function itself."""
        return self.operator if self.truth is None else ""

    def __str__(self) -> str:
        return self.id


CASES: list[Kink] = []


def add(cases: dict[str, Any], shape: tuple[int, ...] = ROW, crosses: bool = True) -> None:
    """Take up functions, or pairs of a function and its truth."""
    for id, case in cases.items():
        function, truth = case if isinstance(case, tuple) else (case, None)
        CASES.append(Kink(id, function, shape, truth, crosses))


def on(name: str, *args: Any, **kwargs: Any) -> Callable[[Tensor], Any]:
    """The method of that name."""
    return lambda z: getattr(z, name)(*args, **kwargs)


class Hidden(nn.Module):
    """f(z), with z smooth in the weights and of the wanted shape."""

    def __init__(self, shape: tuple[int, ...], function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        size = torch.Size(shape[1:]).numel()
        self.shape, self.function = shape, function
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, size)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(2.5 * self.second(self.first(x).tanh()).view(self.shape))


def problem(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...] = ROW
) -> tuple[nn.Module, Callable[[], Tensor], list[Tensor]]:
    """``(model, closure, leaves)``, the same at every call; the leaves include the inputs."""
    torch.manual_seed(11)
    model = Hidden(shape, copy.deepcopy(function))  # a module has weights and buffers of its own
    x = torch.randn(shape[0], 3).double().requires_grad_()

    def closure() -> Tensor:
        y = model(x)
        slopes = torch.linspace(0, 9, y.numel(), dtype=y.dtype).cos().view(y.shape)
        return (y * slopes + (y + 0.3).sin()).mean()

    return model, closure, [*model.parameters(), x]
