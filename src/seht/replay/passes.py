"""The passes of one difference estimate: the centre records, the perturbed ones replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from seht.persample.signs import Signs
from seht.replay.buffers import BorrowedBuffers, compiles
from seht.replay.centre import Centre
from seht.replay.checkpoints import checkpoints
from seht.replay.made_leaves import pairs
from seht.replay.replayer import Replayer, extra_run
from seht.replay.witness import unrepeatable
from seht.task import Directions, Probe, check_loss, split
from seht.tensors.gradients import Gradient, dense, inner, sketch, times
from seht.tensors.graph import Take, handed_out, handing_over, mark, quiet
from seht.tensors.hooks import muted


class Passes(Centre):
    """The centre pass of one task, and its perturbed passes.

    Every pass starts from the same random state and the same buffers, and sees the decisions of
    the centre; when the last has run, the random state is where the centre left it.
    """

    @contextmanager
    def at(
        self,
        sigma: Directions | None,
        step: Tensor | float = 0.0,
        *,
        track: bool = False,
        formed: bool = False,
    ) -> Iterator[Any]:
        """Run the closure at w + step * sigma and yield its output while the weights are there.

        With per-sample probes ``track`` asks for the derivative in the step itself. The logits are
        ``formed``, or need not be.
        """
        replayer = Replayer(self.recorder)
        if self.losses is not None:
            replayer.heads = self.losses.rules(unformed=not formed)
        replayer.aliases = self._stand_ins
        replayer.signs = self.signs(sigma, step, track)
        self.random.begin(self.start)
        try:
            moved = self.weights.moved(sigma, step) if sigma is not None else nullcontext()
            with moved, checkpoints():
                with BorrowedBuffers(self.task.model, self.buffers.others) as buffers:
                    if self._watch:
                        replayer.witness = self._witness(mark(), buffers)
                    with (
                        muted(self._hooks),
                        self.boundary or nullcontext(),
                        self._mode(replayer),
                        extra_run(),
                        self.precision.run(),
                    ):
                        output = self._again()
                replayer.finish(self.end)
                self._watch = False  # one comparison is enough
                self._find_twins(output)
                yield output
        finally:
            self._twins = self._lasting
            self.random.finish(self.end)

    _twins: tuple[tuple[int, Tensor], ...] = ()
    """Leaves that a pass made in place of the centre's, and their places."""
    _lasting: tuple[tuple[int, Tensor], ...] = ()
    """Those of the pass that stands for the centre's (:meth:`apart`)."""

    def _find_twins(self, output: Any) -> None:
        if self._made:
            roots = [split(output)[0], *(self.boundary.outputs if self.boundary else [])]
            known = [*self.leaves, *(leaf for _, leaf in self._stand_ins.values())]
            standing = {id(result) for result, _ in self._stand_ins.values()}
            places = {id(leaf): place for place, leaf in enumerate(self.leaves)}
            made = [leaf for leaf in self._made if id(leaf) not in standing]
            new = tuple((places[id(a)], b) for a, b in pairs(made, roots, known))
            self._twins = (*self._lasting, *new)

    def by_place(self, parts: Sequence[tuple[Tensor, Tensor]]) -> Gradient:
        """Gradients of some leaves, or of their twins, as one of all."""
        places = {id(leaf): place for place, leaf in enumerate(self.leaves)}
        places |= {id(leaf): place for place, leaf in self._twins}
        total: Gradient = [None] * len(self.leaves)
        for leaf, g in parts:
            if id(leaf) in places:
                total[places[id(leaf)]] = g
        return total

    def _again(self) -> Any:
        try:
            return self.task.closure()
        except StopIteration as error:
            raise unrepeatable("what it takes its data from has run out") from error

    def apart(self) -> tuple[Tensor, list[Tensor]]:
        """Loss and outputs at the centre, to differentiate as we like: where there are hooks, of
        a pass that has none.
        """
        if not self.hooked:
            return self.loss, list(self.boundary.outputs) if self.boundary else []
        with self.at(None, formed=True) as output:
            loss = check_loss(split(output)[0])
            self._lasting = self._twins  # the graph is used when the pass is over
            return loss, list(self.boundary.outputs) if self.boundary else []

    def gradient(
        self, sigma: Directions, step: Tensor, total: Gradient, scale: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Add the gradient at w + step * sigma (times ``scale``) to ``total``; gives sigma . g."""
        with self.at(sigma, step, track=True) as output:
            loss = check_loss(split(output)[0])
            del output
            return self.pull_along(sigma, total, [loss], None, scale=scale)

    def value(self, sigma: Directions, step: Tensor) -> Tensor:
        """The loss at w + step * sigma, and nothing else."""
        with self.at(sigma, step) as output:
            return check_loss(split(output)[0]).detach().double()

    def forget(self) -> None:
        """The centre's loss and outputs are not needed any more."""
        self.loss, self.output = self.loss.detach(), None

    def signs(self, sigma: Directions | None, step: Tensor | float, track: bool) -> Signs | None:
        """The examples' own directions at that distance."""
        if sigma is None or not self.weights.still:
            return None
        assert isinstance(sigma, Probe) and self.tracker is not None
        if self._signs is None or self._signs[0] is not sigma:
            own = Signs(sigma, self.used, self.tracker.n, self.weights.still)
            own.frugal = self._dropped is not None
            self._signs = (sigma, own)
        self._signs[1].move(step, track=track)
        return self._signs[1]

    def centre_gradient(self, *, keep: bool) -> Gradient:
        """The gradient of the loss at the centre."""
        if self.held:
            with self.at(None) as output:
                return self.pull([check_loss(split(output)[0])], None, keep=self.older)
        loss, _ = self.apart()
        return self.pull([loss], None, keep=keep or self.older)

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
        targets = [*self.leaves, *(leaf for _, leaf in self._stand_ins.values())]
        twins = [leaf for _, leaf in self._twins]
        scaled = self.precision.scaled(outputs, cotangents)
        if scaled is not None:
            cotangents, back = scaled
            give = take
            take = None if give is None else lambda place, g: give(place, g * back.to(g.dtype))
        handing = nullcontext(set[int]()) if take is None else handing_over(targets, take)
        with quiet([*self.leaves, *twins]), handing as taken:
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
        found = self.pull(outputs, cotangents, keep=self.older, take=first, more=more)
        rest = found[len(found) - len(more) :]
        del found[len(found) - len(more) :]
        total.extend([None] * (len(found) - len(total)))
        for place, g in enumerate(found):
            if g is not None:
                take(place, g)
        return rest

    def pull_along(
        self,
        sigma: Directions,
        total: Gradient,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor] | None,
        *,
        scale: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The same in a pass that tracks its steps; gives sigma . g for each drawn tensor."""
        found = dict.fromkeys(self.used, self.loss.detach().new_zeros((), dtype=torch.float64))
        moved = {id(w): n for n, w in self.used.items() if n not in self.weights.still}
        names = [moved.get(id(leaf)) for leaf in self.leaves]

        def see(place: int, g: Tensor) -> None:
            name = names[place] if place < len(names) else None
            if name is not None:
                found[name] = inner(sigma[name], g)

        steps = {} if self._signs is None else self._signs[1].steps
        more = list(steps.values())
        slopes = self.pull_into(total, outputs, cotangents, scale=scale, see=see, more=more)
        found |= {n: g.double() for n, g in zip(steps, slopes, strict=True) if g is not None}
        return found

    def pull_centre(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Gradient:
        """The gradient that flows back from the outputs at the centre."""
        if outputs[0].grad_fn is not None and not self.held:
            return self.pull(outputs, cotangents, keep=True)
        with self.at(None):  # the lean form has dropped that graph
            return self.pull(self.boundary.outputs, cotangents, keep=self.older)  # type: ignore[union-attr]

    # What is different where the weights lie on several ranks (``fsdp_passes.py``).

    @property
    def lasting(self) -> bool:
        """Whether the graph of a pass can be differentiated more than once; compiled code
        overwrites what it has kept.
        """
        return not compiles()

    @property
    def own(self) -> Tensor | None:
        """This rank's own loss, where the estimate's is that of all ranks."""
        return None

    def over_ranks(self, value: Tensor, loss: Tensor, *, partial: bool) -> tuple[Tensor, Tensor]:
        """The trace and the loss of all ranks: there is one."""
        return value, loss

    def commit(self) -> None:
        """The estimate is wanted: take over what the centre pass wrote into buffers."""
        self.buffers.commit()

    def refuse_behind(self, leaves: set[int]) -> None:
        """For the Gauss-Newton trace: weights behind the outputs may be gone; here they are not."""

    def sketch(self, gradient: Gradient) -> Tensor:
        """A few thousand entries of each part of a gradient."""
        return sketch(gradient, self.leaves)

    def sizes(self, *sketches: Tensor) -> list[Tensor]:
        """Their norms."""
        return [part.norm() for part in sketches]

    def handed_out(self, value: Tensor, total: Gradient) -> Tensor:
        """A scalar with this value, whose gradient in the leaves is known."""
        return handed_out(value, total, self.targets)
