"""Measuring changes nothing: model and random states are restored bit for bit, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from seht.precision.policy import autocasts
from seht.probes import generator, mix
from seht.tensors.random_state import own_randomness
from seht.tensors.undo import uninterrupted


@contextmanager
def untouched(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """The model is afterwards what it was: weights, buffers, gradients, modes; so is every random
    state. Also after an exception or a Ctrl-C, which waits until the model is whole again.

    Inside, randomness (dropout, a shuffling loader) starts from ``seed``; autocast is off. Weights
    are put back by those who move them, from a copy of their own, before a Ctrl-C comes through: a
    second copy here would be felt beside a small batch.
    """
    parameters = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    buffers = [
        (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        with (
            evaluating(model, wanted=False),
            own_randomness(),
            ExitStack() as stack,
            torch.inference_mode(False),
        ):
            for device, _ in autocasts():  # second differences drown in half precision's rounding
                stack.enter_context(torch.autocast(device, enabled=False))
            torch.manual_seed(mix(seed, 7) >> 1)
            yield
    finally:
        with uninterrupted(), torch.no_grad():
            for p, requires_grad, own in parameters:
                p.requires_grad_(requires_grad)
                p.grad = own
            for holder, name, buffer, held in buffers:
                holder[name] = buffer
                if buffer is not None and held is not None:
                    _restore(buffer, held)


@contextmanager
def evaluating(model: nn.Module, wanted: bool = True) -> Iterator[None]:
    """Evaluation mode for as long as the block runs, if that is ``wanted``."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, training in modes:
            module.training = training and not wanted
        yield
    finally:
        with uninterrupted():
            for module, training in modes:
                module.training = training


def _restore(tensor: Tensor, value: Tensor) -> None:
    # Compared as bits: a NaN is not equal to itself, and nothing is written where nothing changed.
    if not torch.equal(_bits(tensor), _bits(value)):
        tensor.data.copy_(value)


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8) if flat.numel() else flat


def unit_normal(shape: torch.Size, seed: int, *place: int) -> Tensor:
    """Normal numbers that depend on the seed and the place alone, not on device or dtype."""
    return torch.randn(shape, generator=generator(mix(seed, *place)), dtype=torch.float64)
