"""The leaves of the loss, in which the gradients of all passes are taken, and their stand-ins.

A perturbed pass may end elsewhere than the centre's: at stand-ins for the results of a replayed
prefix (``prefix.py``), and at twins of leaves that the closure makes anew in every run. A gradient
is a list with one place for each leaf, the same in every pass.

``x = X.clone().requires_grad_()`` (for input gradients, or for a frozen embedding before activation
checkpoints) is a different tensor in every pass, and the gradients of the perturbed passes belong
to the centre's. A leaf and its twin in another pass have the same value, because leaves have no
graph and detached values are replayed; several of them are matched by the order of their use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from seht.precision.policy import Precision
from seht.replay.witness import unrepeatable
from seht.tensors.gradients import Gradient, Take, dense, handed_out, handing_over, sketch, times
from seht.tensors.graph import first_uses, quiet
from seht.tensors.trees import StandIns


class Leaves:
    """The leaves of one estimate. Those in ``made`` do not belong to the model, and later passes
    may make them anew. A graph that is ``older`` than the closure is the user's and is kept.
    """

    def __init__(
        self, tensors: list[Tensor], made: list[Tensor], precision: Precision, *, older: bool
    ) -> None:
        self.tensors = tensors
        self.stand_ins: StandIns = {}
        """The stand-ins for the results of the prefix, shared by the passes."""
        self._made = made
        self._precision, self._older = precision, older
        self._twins: tuple[tuple[int, Tensor], ...] = ()
        """Leaves that a pass made in place of the centre's, and their places."""
        self._lasting: tuple[tuple[int, Tensor], ...] = ()
        """Those of the pass that stands for the centre's."""

    @property
    def results(self) -> list[Tensor]:
        """The centre's tensors that the other passes replace by stand-ins."""
        return [result for result, _ in self.stand_ins.values()]

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors of the perturbed passes' gradients: leaves, and results of the prefix."""
        return [*self.tensors, *self.results]

    @property
    def targets(self) -> list[Tensor]:
        """The tensors that receive the leaves' gradients: the leaves, or originals of copies."""
        return self._precision.targets(self.tensors)

    # --- twins --------------------------------------------------------------------------------

    def meet(self, roots: Sequence[Tensor]) -> None:
        """Find the twins in the graph of a pass that has run."""
        if self._made:
            known = [*self.tensors, *(leaf for _, leaf in self.stand_ins.values())]
            standing = {id(result) for result in self.results}
            places = {id(leaf): place for place, leaf in enumerate(self.tensors)}
            made = [leaf for leaf in self._made if id(leaf) not in standing]
            new = tuple((places[id(a)], b) for a, b in pairs(made, roots, known))
            self._twins = (*self._lasting, *new)

    def hold(self) -> None:
        """The graph of this pass is used when the pass is over."""
        self._lasting = self._twins

    def part(self) -> None:
        """The pass is over."""
        self._twins = self._lasting

    def by_place(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Gradient:
        """Gradients of some leaves, or of their twins, as one of all."""
        places = {id(leaf): place for place, leaf in enumerate(self.tensors)}
        places |= {id(leaf): place for place, leaf in self._twins}
        total: Gradient = [None] * len(self.tensors)
        for leaf, g in parts:
            if id(leaf) in places:
                total[places[id(leaf)]] = g
        return total

    # --- gradients ----------------------------------------------------------------------------

    def pull(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor | None] | None,
        *,
        keep: bool,
        take: Take | None = None,
        more: Sequence[Tensor] = (),
    ) -> Gradient:
        """The gradient in every leaf (and stand-in for the prefix), past the users' hooks.

        ``take`` is handed the parts as they come; they are missing in what is returned. The
        gradient in ``more`` comes last.
        """
        targets = [*self.tensors, *(leaf for _, leaf in self.stand_ins.values())]
        twins = [leaf for _, leaf in self._twins]
        scaled = self._precision.scaled(outputs, cotangents)
        if scaled is not None:
            cotangents, back = scaled
            give = take
            take = None if give is None else lambda place, g: give(place, g * back.to(g.dtype))
        handing = nullcontext(set[int]()) if take is None else handing_over(targets, take)
        with quiet([*self.tensors, *twins]), handing as taken:
            inputs = [*targets, *more, *twins]
            found = list(
                torch.autograd.grad(
                    outputs, inputs, cotangents, retain_graph=keep, allow_unused=True
                )
            )
        own = [found.pop() for _ in twins][::-1]
        for (place, _), g in zip(self._twins, own, strict=True):
            found[place] = g if found[place] is None else found[place]
        parts = [None if place in taken else dense(g) for place, g in enumerate(found)]
        return parts if scaled is None else times(parts, back)

    def pull_into(
        self,
        total: Gradient,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor | None] | None,
        *,
        scale: Tensor | None = None,
        see: Take = lambda place, g: None,
        more: Sequence[Tensor] = (),
    ) -> Gradient:
        """Add a gradient to ``total``, part by part; ``see`` is shown each first. Returns that in
        ``more``.

        With a ``scale`` it is multiplied by that, and ``total`` is overwritten in place: it must be
        ours. Without one the sum is made out of place, as what autograd hands out may be shared
        between leaves, or belong to somebody else.
        """

        def take(place: int, g: Tensor) -> None:
            see(place, g)
            known = total[place]
            if scale is None:
                total[place] = g if known is None else known + g
            elif known is None:
                total[place] = g * scale
            else:
                total[place] = known.addcmul_(g, scale.to(g.dtype))

        # The first of several gradients has to be held anyway.
        first = take if total else None
        found = self.pull(outputs, cotangents, keep=self._older, take=first, more=more)
        rest = found[len(found) - len(more) :]
        del found[len(found) - len(more) :]
        total.extend([None] * (len(found) - len(total)))
        for place, g in enumerate(found):
            if g is not None:
                take(place, g)
        return rest

    def sketch(self, gradient: Gradient) -> Tensor:
        """A few thousand entries of each part of a gradient."""
        return sketch(gradient, self.tensors)

    def sizes(self, *sketches: Tensor) -> list[Tensor]:
        """Their norms."""
        return [part.norm() for part in sketches]

    def handed_out(self, value: Tensor, total: Gradient) -> Tensor:
        """A scalar with this value, whose gradient in the leaves is known."""
        return handed_out(value, total, self.targets)


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
