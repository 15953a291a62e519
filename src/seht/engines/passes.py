"""The passes of one difference estimate: the centre records, the perturbed ones replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from seht.engines.base import Directions, Task, check_loss, report_unused, split
from seht.engines.boundary import Boundary
from seht.engines.buffers import BorrowedBuffers
from seht.engines.graph import Take, handing_over, leaves_of, mark, quiet, refuse_older
from seht.engines.replay import Prefix, Recorder, Replayer, extra_run
from seht.engines.state import RandomState, Weights
from seht.engines.witness import Witness

Gradient = list[Tensor | None]


class Passes:
    """The centre pass of one task, and its perturbed passes.

    Every pass starts from the same random state and the same buffers, and sees the decisions of
    the centre; when the last has run, the random state is where the centre left it.
    """

    def __init__(
        self,
        task: Task,
        *,
        lean: bool = False,
        frozen: bool = True,
        prefix: bool = False,
        watch: bool = False,
    ) -> None:
        self.task = task
        self.frozen = frozen
        self.random = RandomState(task.weights.values())
        self.buffers = BorrowedBuffers(task.model)
        kept = Prefix({id(w) for w in task.weights.values()}) if prefix else None
        self.recorder = Recorder(self.random, compact=lean, prefix=kept)
        self.boundary = Boundary(task) if task.curvature == "ggn" else None
        if self.boundary is not None:
            self.boundary.cut = lean
        self.start = self.random.read()
        self._watch = watch
        since = mark()
        with self.buffers:
            if watch:
                self.recorder.witness = self._witness(since, self.buffers)
            with self.boundary or nullcontext(), self._mode(self.recorder):
                self.output = task.closure()
        self.loss = check_loss(split(self.output)[0])
        self.end = self.random.read()
        self.leaves, self.older = leaves_of(self._roots(), since)
        if self.boundary is not None:  # outputs that were cut off are no leaves of the user's
            cut = {id(z) for z in self.boundary.outputs}
            self.leaves = [leaf for leaf in self.leaves if id(leaf) not in cut]
        reached = {id(leaf) for leaf in self.leaves}
        if self.older:
            refuse_older(task.weights, [self.loss], since)
        self.used = {n: w for n, w in task.weights.items() if id(w) in reached}
        self.unused = report_unused(task, [n for n in task.weights if n not in self.used])
        if not task.differentiable:  # the value needs no other gradient
            self.leaves = list(self.used.values())
        self.weights = Weights(self.used)
        if kept is not None and not (kept.intact() and self._before_all(kept)):
            self.recorder.prefix = None
        self.tied: list[str] = []
        """Drawn weights that the loss uses past the outputs (for the Gauss-Newton trace)."""
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def inputs(self) -> list[Tensor]:
        """What the perturbed passes' gradients belong to: the leaves, and results of the prefix."""
        return [*self.leaves, *(result for result, _ in self._stand_ins.values())]

    def _roots(self) -> list[Tensor]:
        if self.boundary is None or not self.boundary.cut:
            return [self.loss]
        self.boundary.cut = False  # the passes to come keep their graphs
        roots, self.boundary.roots = self.boundary.roots, []
        return [self.loss, *roots]

    def _before_all(self, prefix: Prefix) -> bool:
        """Whether no drawn weight has a use in the prefix that the mode did not see."""
        results = [t for t in prefix.results() if t.requires_grad]
        drawn = {id(w) for w in self.used.values()}
        return not any(id(leaf) in drawn for leaf in leaves_of(results, 0)[0])

    def _witness(self, since: int, buffers: BorrowedBuffers) -> Witness:
        own = buffers.clones
        if self.boundary is not None:
            self.boundary.made = own
        return Witness(since, own, before=self.recorder.witness)

    def _mode(self, mode: Any) -> Any:
        return mode if self.frozen else nullcontext()

    @contextmanager
    def at(self, sigma: Directions | None, step: Tensor | float = 0.0) -> Iterator[Any]:
        """Run the closure at w + step * sigma and yield its output while the weights are there."""
        replayer = Replayer(self.recorder)
        replayer.aliases = self._stand_ins
        self.random.begin(self.start)
        try:
            with self.weights.moved(sigma, step) if sigma is not None else nullcontext():
                with BorrowedBuffers(self.task.model, self.buffers.others) as buffers:
                    if self._watch:
                        replayer.witness = self._witness(mark(), buffers)
                    with self.boundary or nullcontext(), self._mode(replayer), extra_run():
                        output = self.task.closure()
                if self.frozen:
                    replayer.finish(self.end)
                    self._watch = False  # one comparison is enough
                yield output
        finally:
            self.random.write(self.end)

    def gradient(
        self, sigma: Directions, step: Tensor, total: Gradient, scale: Tensor | None = None
    ) -> Tensor:
        """Add the gradient at w + step * sigma (times ``scale``) to ``total``; gives sigma . g."""
        drawn = {id(w): sigma[n] for n, w in self.used.items()}
        along = [drawn.get(id(leaf)) for leaf in self.leaves]
        dot = self.loss.detach().new_zeros((), dtype=torch.float64)

        def see(place: int, g: Tensor) -> None:
            direction = along[place] if place < len(along) else None
            if direction is not None:
                dot.add_(inner(direction, g))

        with self.at(sigma, step) as output:
            loss = check_loss(split(output)[0])
            del output
            self.pull_into(total, [loss], None, scale=scale, see=see)
        return dot

    def centre_gradient(self, *, keep: bool) -> Gradient:
        """The gradient of the loss at the centre."""
        return self.pull([self.loss], None, keep=keep or self.older)

    def pull(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor | None] | None,
        *,
        keep: bool,
        take: Take | None = None,
    ) -> Gradient:
        """The gradient in every leaf (and stand-in for the prefix), past the users' hooks.

        ``take`` is handed the parts as they come; they are missing in what is returned.
        """
        targets = [*self.leaves, *(leaf for _, leaf in self._stand_ins.values())]
        handing = nullcontext(set[int]()) if take is None else handing_over(targets, take)
        with quiet(self.leaves), handing as taken:
            found = torch.autograd.grad(
                outputs, targets, cotangents, retain_graph=keep, allow_unused=True
            )
        return [None if place in taken else g for place, g in enumerate(found)]

    def pull_into(
        self,
        total: Gradient,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor | None] | None,
        *,
        scale: Tensor | None = None,
        see: Take = lambda place, g: None,
    ) -> None:
        """Add a gradient to ``total``, part by part; ``see`` is shown each first.

        With a ``scale`` it is multiplied by that, and ``total`` is overwritten in place: it must be
        ours. Without one the sum is made out of place, as what autograd hands out may be shared
        between leaves, or belong to somebody else.
        """

        def take(place: int, g: Tensor) -> None:
            see(place, g)
            known = total[place]
            if scale is None:
                total[place] = g if known is None else known + g
            elif known is None or known.layout != torch.strided or g.layout != torch.strided:
                total[place] = g * scale if known is None else known + g * scale
            else:
                total[place] = known.addcmul_(g, scale.to(g.dtype))

        # The first of several gradients has to be held anyway.
        found = self.pull(outputs, cotangents, keep=self.older, take=take if total else None)
        total.extend([None] * (len(found) - len(total)))
        for place, g in enumerate(found):
            if g is not None:
                take(place, g)

    def pull_centre(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Gradient:
        """The gradient that flows back from the outputs at the centre."""
        if outputs[0].grad_fn is not None:
            return self.pull(outputs, cotangents, keep=True)
        with self.at(None):  # the lean form has dropped that graph
            return self.pull(self.boundary.outputs, cotangents, keep=self.older)  # type: ignore[union-attr]


def inner(direction: Tensor, g: Tensor, most: int = 1 << 18) -> Tensor:
    """Their inner product, in pieces: the signs are small numbers until they meet the gradient."""
    if not g.is_contiguous():
        return (g * direction).sum().double()
    pairs = zip(direction.flatten().split(most), g.flatten().split(most), strict=True)
    return torch.stack([torch.dot(s.to(part.dtype), part) for s, part in pairs]).sum().double()


def add(a: Gradient, b: Gradient) -> Gradient:
    """a + b; consumes both, so that the old parts go as the new ones come.

    Out of place: what autograd hands out may be shared between leaves, or belong to somebody else.
    """
    total: Gradient = []
    longest = max(len(a), len(b))  # a shorter list has nothing for the rest
    for parts in (a, b):
        parts.extend([None] * (longest - len(parts)))
        parts.reverse()
    while a:
        x, y = a.pop(), b.pop()
        total.append(y if x is None else x if y is None else x + y)
    return total


def times(a: Gradient, scale: Tensor | float) -> Gradient:
    """scale * a, out of place too."""
    return [None if g is None else g * scale for g in a]


def sketch(gradient: Gradient, leaves: Sequence[Tensor], most: int = 4096) -> Tensor:
    """A few thousand entries of each part, weighted so that norms are kept on average.

    The check of the step compares gradients at several steps; holding whole ones would cost the
    memory that the engine saves.
    """
    parts = []
    for leaf, g in zip(leaves, gradient, strict=False):
        stride = max(1, -(-leaf.numel() // most))
        taken = leaf.detach().flatten()[::stride] * 0 if g is None else g.flatten()[::stride]
        parts.append(taken.double() * stride**0.5)
    return torch.cat(parts)
