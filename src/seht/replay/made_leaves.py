"""Leaves that a closure makes itself, anew in every run.

``x = X.clone().requires_grad_()`` (for input gradients, or for a frozen embedding before activation
checkpoints) is a different tensor in every pass, and the gradients of the perturbed passes belong
to the centre's. A leaf and its twin in another pass have the same value, because leaves have no
graph and detached values are replayed; several of them are matched by the order of their use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from seht.replay.witness import unrepeatable
from seht.tensors.gradients import Gradient
from seht.tensors.graph import first_uses


def pairs(
    centre: Sequence[Tensor], roots: Sequence[Tensor], known: Iterable[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a leaf of the centre pass and its twin in a later pass, whose graph ends in
    ``roots``. ``known`` leaves have no twins.
    """
    reached = first_uses(roots)
    own = {id(leaf) for leaf in known}
    present = {id(leaf) for leaf in reached}
    made = _kinds(leaf for leaf in reached if id(leaf) not in own)
    missing = _kinds(leaf for leaf in centre if id(leaf) not in present)
    return [pair for kind, new in made.items() for pair in _match(missing[kind], new)]


def _kinds(leaves: Iterable[Tensor]) -> defaultdict[object, list[Tensor]]:
    found: defaultdict[object, list[Tensor]] = defaultdict(list)
    for leaf in leaves:
        found[leaf.shape, leaf.dtype, leaf.device].append(leaf)
    return found


def _match(old: list[Tensor], new: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    in_order = list(zip(old, new, strict=False))
    if len(old) == len(new) and (len(old) == 1 or all(torch.equal(a, b) for a, b in in_order)):
        return in_order
    rest, found = list(old), []
    for leaf in new:  # some may be ours
        place = next((k for k, other in enumerate(rest) if torch.equal(leaf, other)), None)
        if place is not None:
            found.append((rest.pop(place), leaf))
    if rest and len(found) < len(new):
        shape = tuple(rest[0].shape)
        raise unrepeatable(f"it made a leaf of shape {shape} with other values than before")
    return found


def refuse_lost(centre: Gradient, other: Gradient) -> None:
    """Refuse a leaf that has a gradient only in the centre pass: the difference would be that
    gradient divided by the square of the step.
    """
    for g, known in zip(centre, other, strict=False):
        if known is None and g is not None and bool(g.any()):
            raise unrepeatable(
                f"a leaf of shape {tuple(g.shape)} has a gradient in its first run alone"
            )
