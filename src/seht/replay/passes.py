"""The passes of one difference estimate: the centre has recorded, the perturbed ones replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from seht.persample.signs import Signs
from seht.replay.buffers import BorrowedBuffers, compiles
from seht.replay.centre import Centre, Hidden
from seht.replay.checkpoints import checkpoints
from seht.replay.made_leaves import pairs
from seht.replay.plan import Plan
from seht.replay.prefix import Prefix
from seht.replay.replayer import Replayer, extra_run
from seht.replay.weights import Weights
from seht.replay.witness import Witness, unrepeatable
from seht.task import Directions, Probe, check_loss, report_unused, split
from seht.tensors.deferred import Deferred
from seht.tensors.gradients import Gradient, dense, inner, sketch, times
from seht.tensors.graph import (
    Survey,
    Take,
    first_uses,
    handed_out,
    handing_over,
    leaves_of,
    mark,
    quiet,
    refuse_older,
    survey,
)
from seht.tensors.hooks import muted
from seht.tensors.shared_memory import refuse_others
from seht.tensors.trees import StandIns, tensors


class Passes:
    """What the loss of a centre pass depends on, and the perturbed passes.

    Every pass starts from the same random state and the same buffers, and sees the decisions of
    the centre; when the last has run, the random state is where the centre left it.
    """

    def __init__(self, plan: Plan, centre: Centre, hidden: Hidden = nullcontext) -> None:
        task = plan.task
        self._plan, self._centre, self._hidden = plan, centre, hidden
        self.task, self.precision = task, plan.precision
        self.loss, self.output, self.boundary = centre.loss, centre.output, centre.boundary
        self.losses, self.terms = centre.losses, centre.terms
        self.hooked = centre.hooked
        found = survey(centre.roots, centre.since)
        self.coarsest, self.older = found.coarsest, found.older
        self.leaves, made = self._reached(found)
        """What the loss depends on."""
        self._made = made if task.differentiable else []
        """Leaves that are none of the model's, which later passes may make anew
        (``made_leaves.py``).
        """
        self.precision.check_leaves(self.leaves)
        self.used = self._drawn(found)
        """The drawn tensors among them."""
        self.unused = report_unused(task, [n for n in task.weights if n not in self.used])
        if not task.differentiable:  # the value needs no other gradient
            self.leaves = list(self.used.values())
        moving = set() if centre.tracker is None else centre.tracker.moving()
        self.weights = self._movable({n for n in moving if n in self.used})
        self.prefix = self._kept_prefix()
        """What comes before the first drawn weight, where it is replayed."""
        self.tied: list[str] = []
        """Drawn weights that the loss uses past the outputs (for the Gauss-Newton trace)."""
        self._stand_ins: StandIns = {}
        self._signs: tuple[Probe, Signs] | None = None
        self._watch = plan.watch
        self._twins: tuple[tuple[int, Tensor], ...] = ()
        """Leaves that a pass made in place of the centre's, and their places."""
        self._lasting: tuple[tuple[int, Tensor], ...] = ()
        """Those of the pass that stands for the centre's (:meth:`apart`)."""

    def _reached(self, found: Survey) -> tuple[list[Tensor], list[Tensor]]:
        """What the loss depends on, and what of that is none of the model's."""
        # Outputs that were cut off are no leaves of the user's.
        cut = {id(z) for z in self.boundary.outputs} if self.boundary is not None else set()
        leaves = [leaf for leaf in found.leaves if id(leaf) not in cut]
        return leaves, self._beside_the_model(leaves)

    def _beside_the_model(self, leaves: list[Tensor]) -> list[Tensor]:
        """The leaves that are none of the model's, in the order of their use; they are rare."""
        others = {id(leaf) for leaf in leaves} - {id(p) for p in self.task.parameters}
        if not others:
            return []
        made = [leaf for leaf in first_uses(self._centre.roots) if id(leaf) in others]
        refuse_others(self.task.weights, made)
        return made

    def _drawn(self, found: Survey) -> dict[str, Tensor]:
        """The drawn tensors that the loss depends on."""
        if self.older:
            refuse_older(self.task.weights, [self.loss], self._centre.since)
        reached = {id(leaf) for leaf in self.leaves}
        return {n: w for n, w in self.task.weights.items() if id(w) in reached}

    def _movable(self, still: set[str]) -> Weights:
        return Weights(self.used, still)

    def _kept_prefix(self) -> Prefix | None:
        """The prefix, if it can be replayed and no drawn weight has a use in it that the mode did
        not see.
        """
        prefix = self._centre.recorder.prefix
        if prefix is None or self.hooked or not prefix.intact():
            return None
        drawn = {id(w) for w in self.used.values()}
        leaves, _ = leaves_of([t for t in prefix.results() if t.requires_grad], 0)
        return None if any(id(leaf) in drawn for leaf in leaves) else prefix

    def refuse_hooks(self) -> None:
        """Refuse hooks of the user's that would meet more than the gradient of the loss."""
        if self.hooked and self._plan.held:
            raise ValueError(
                "coupling='frozen' sends its gradient through the network's own graph, where "
                "backward hooks would meet it; remove the hooks, or take coupling='own'"
            )

    @property
    def shared(self) -> tuple[str, ...]:
        """With per-sample probes: the used tensors that keep one direction for all examples."""
        if self._centre.tracker is None:
            return ()
        return tuple(n for n in self.used if n not in self.weights.still)

    @property
    def examples(self) -> int | None:
        """The number of examples, where each has a probe of its own."""
        return None if self._centre.tracker is None else self._centre.tracker.n

    @property
    def held(self) -> bool:
        """Whether batch statistics are held. In the perturbed passes they are leaves; in the
        centre's graph they are not, and its gradients must not be compared with theirs.
        """
        return self._centre.tracker is not None and self._centre.tracker.holds

    @property
    def inputs(self) -> list[Tensor]:
        """What the perturbed passes' gradients belong to: the leaves, and results of the prefix."""
        return [*self.leaves, *(result for result, _ in self._stand_ins.values())]

    @property
    def targets(self) -> list[Tensor]:
        """What the leaves' gradients are handed out to: themselves, or what they are copies of."""
        return self.precision.targets(self.leaves)

    def ends(self, roots: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """For the scalar form: the roots of the centre's graph and :attr:`inputs`.

        As they are, or (``deferred.py``) where the user's backward would be less precise than ours.
        """
        if not self.precision.apart:
            return roots, self.inputs
        inner = [*roots, *(result for result, _ in self._stand_ins.values())]
        aux = split(self.output)[1]
        keep = self.older or any(t.requires_grad for t in tensors(aux))  # in the user's hands
        found = Deferred.apply(self.precision, keep, inner, self.leaves, *self.targets)
        leaves = list(found[len(inner) :])
        return list(found[: len(roots)]), [*leaves, *found[len(roots) : len(inner)]]

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
        centre, task = self._centre, self.task
        heads = None if centre.losses is None else centre.losses.rules(unformed=not formed)
        signs = self.signs(sigma, step, track)
        centre.random.begin(centre.start)
        try:
            moved = self.weights.moved(sigma, step) if sigma is not None else nullcontext()
            with moved, checkpoints():
                with BorrowedBuffers(task.model, centre.buffers.others, task.modules) as buffers:
                    replayer = Replayer(
                        centre.recorder,
                        self._witness(buffers),
                        heads,
                        prefix=self.prefix,
                        stand_ins=self._stand_ins,
                        signs=signs,
                    )
                    with (
                        muted(centre.hooks),
                        self.boundary or nullcontext(),
                        self._hidden(),
                        replayer,
                        extra_run(),
                        self.precision.run(),
                    ):
                        output = self._again()
                replayer.finish(centre.end)
                self._watch = False  # one comparison is enough
                self._find_twins(output)
                yield output
        finally:
            self._twins = self._lasting
            centre.random.finish(centre.end)

    def _witness(self, buffers: BorrowedBuffers) -> Witness | None:
        if not self._watch:
            return None
        own = [buffers.clones] if self.boundary is None else [buffers.clones, self.boundary.given]
        return Witness(mark(), own, before=self._centre.recorder.witness)

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

    def rewind(self) -> None:
        """The estimate is begun anew: the random state is where it was before the centre."""
        self._centre.random.begin(self._centre.start)

    def forget(self) -> None:
        """The centre's loss and outputs are not needed any more."""
        self.loss, self.output = self.loss.detach(), None

    def signs(self, sigma: Directions | None, step: Tensor | float, track: bool) -> Signs | None:
        """The examples' own directions at that distance."""
        if sigma is None or not self.weights.still:
            return None
        assert isinstance(sigma, Probe) and self.examples is not None
        if self._signs is None or self._signs[0] is not sigma:
            frugal = self._plan.dropped is not None
            own = Signs(sigma, self.used, self.examples, self.weights.still, frugal=frugal)
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
        self._centre.buffers.commit()

    def tie(self, behind: set[int]) -> None:
        """For the Gauss-Newton trace: the leaves that the loss reaches past the outputs."""
        self.tied = [n for n, w in self.used.items() if id(w) in behind]

    def sketch(self, gradient: Gradient) -> Tensor:
        """A few thousand entries of each part of a gradient."""
        return sketch(gradient, self.leaves)

    def sizes(self, *sketches: Tensor) -> list[Tensor]:
        """Their norms."""
        return [part.norm() for part in sketches]

    def handed_out(self, value: Tensor, total: Gradient) -> Tensor:
        """A scalar with this value, whose gradient in the leaves is known."""
        return handed_out(value, total, self.targets)
