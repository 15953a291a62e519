"""The passes of one difference estimate: the perturbed ones replay what the centre recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seht.persample.signs import Signs
from seht.replay.centre import Centre, Hidden, Plan
from seht.replay.checkpoints import checkpoints
from seht.replay.leaves import Leaves
from seht.replay.prefix import Prefix
from seht.replay.replayer import Replayer, extra_run
from seht.replay.state import BorrowedBuffers, Weights, compiles
from seht.replay.witness import Witness, unrepeatable
from seht.task import Directions, Probe, check_loss, report_unused, split
from seht.tensors.deferred import Deferred
from seht.tensors.gradients import Gradient, inner
from seht.tensors.graph import first_uses, leaves_of, mark, muted, refuse_older, survey
from seht.tensors.memory import refuse_others
from seht.tensors.trees import tensors


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
        # Outputs that were cut off are no leaves of the user's.
        cut = {id(z) for z in self._outputs()}
        leaves = [leaf for leaf in found.leaves if id(leaf) not in cut]
        reached, made = self._reached(leaves)
        self.precision.check_leaves(reached)
        self.used = self._drawn(leaves)
        """The drawn tensors that the loss depends on."""
        self.unused = report_unused(task, [n for n in task.weights if n not in self.used])
        if not task.differentiable:  # the value needs no other gradient
            reached, made = list(self.used.values()), []
        self.leaves = self._leaves(reached, made)
        """What the loss depends on."""
        moving = set() if centre.tracker is None else centre.tracker.weights.moving()
        self.weights = self._movable({n for n in moving if n in self.used})
        self.prefix = self._kept_prefix()
        """What comes before the first drawn weight, where it is replayed."""
        self.tied: list[str] = []
        """Drawn weights that the loss uses past the outputs (for the Gauss-Newton trace)."""
        self._signs: tuple[Probe, Signs] | None = None
        self._watch = plan.watch

    def _reached(self, leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The leaves that the loss depends on, and those of them that are not the model's."""
        return leaves, self._beside_the_model(leaves)

    def _beside_the_model(self, leaves: list[Tensor]) -> list[Tensor]:
        """The leaves that do not belong to the model, in the order of their use; they are rare."""
        others = {id(leaf) for leaf in leaves} - {id(p) for p in self.task.parameters}
        if not others:
            return []
        made = [leaf for leaf in first_uses(self._centre.roots) if id(leaf) in others]
        refuse_others(self.task.weights, made)
        return made

    def _drawn(self, leaves: list[Tensor]) -> dict[str, Tensor]:
        """The drawn tensors that the loss depends on."""
        if self.older:
            refuse_older(self.task.weights, [self.loss], self._centre.since)
        reached = {id(leaf) for leaf in leaves}
        return {n: w for n, w in self.task.weights.items() if id(w) in reached}

    def _leaves(self, tensors: list[Tensor], made: list[Tensor]) -> Leaves:
        return Leaves(tensors, made, self.precision, older=self.older)

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
        leaves = leaves_of([t for t in prefix.results() if t.requires_grad])
        return None if any(id(leaf) in drawn for leaf in leaves) else prefix

    def refuse_hooks(self) -> None:
        """Refuse hooks of the user's that would see more than the gradient of the loss."""
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

    def ends(self, roots: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """For the scalar form: the roots of the centre's graph and the leaves' inputs.

        As they are, or (``deferred.py``) where the user's backward would be less precise than ours.
        """
        if not self.precision.apart:
            return roots, self.leaves.inputs
        inner = [*roots, *self.leaves.results]
        aux = split(self.output)[1]
        keep = self.older or any(t.requires_grad for t in tensors(aux))  # in the user's hands
        found = Deferred.apply(
            self.precision, keep, inner, self.leaves.tensors, *self.leaves.targets
        )
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
                        stand_ins=self.leaves.stand_ins,
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
                self.leaves.meet([split(output)[0], *self._outputs()])
                given = [output]
                del output  # whoever runs the pass may be done with it before its end
                yield given.pop()
        finally:
            self.leaves.part()
            centre.random.finish(centre.end)

    def _witness(self, buffers: BorrowedBuffers) -> Witness | None:
        if not self._watch:
            return None
        own = [buffers.clones] if self.boundary is None else [buffers.clones, self.boundary.given]
        return Witness(mark(), own, before=self._centre.recorder.witness)

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
            return self.loss, self._outputs()
        with self.at(None, formed=True) as output:
            loss = check_loss(split(output)[0])
            self.leaves.hold()
            return loss, self._outputs()

    def _outputs(self) -> list[Tensor]:
        return list(self.boundary.outputs) if self.boundary else []

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
        """The graph of the centre's loss is not needed any more."""
        self.loss = self.loss.detach()
        _, aux, has_aux = split(self.output)
        self.output = (self.loss, aux) if has_aux else self.loss
        self._centre = replace(self._centre, output=self.output, loss=self.loss, roots=[])

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
                return self.leaves.pull([check_loss(split(output)[0])], None, keep=self.older)
        loss, _ = self.apart()
        return self.leaves.pull([loss], None, keep=keep or self.older)

    def pull_along(
        self,
        sigma: Directions,
        total: Gradient,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor] | None,
        *,
        scale: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Add a gradient to ``total`` in a pass that tracks its steps; gives sigma . g for each
        drawn tensor.
        """
        found = dict.fromkeys(self.used, self.loss.detach().new_zeros((), dtype=torch.float64))
        moved = {id(w): n for n, w in self.used.items() if n not in self.weights.still}
        names = [moved.get(id(leaf)) for leaf in self.leaves.tensors]

        def see(place: int, g: Tensor) -> None:
            name = names[place] if place < len(names) else None
            if name is not None:
                found[name] = inner(sigma[name], g)

        steps = {} if self._signs is None else self._signs[1].steps
        more = list(steps.values())
        slopes = self.leaves.pull_into(total, outputs, cotangents, scale=scale, see=see, more=more)
        found |= {n: g.double() for n, g in zip(steps, slopes, strict=True) if g is not None}
        return found

    def pull_centre(self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Gradient:
        """The gradient that flows back from the outputs at the centre."""
        if outputs[0].grad_fn is not None and not self.held:
            return self.leaves.pull(outputs, cotangents, keep=True)
        with self.at(None):  # the lean form has dropped that graph
            return self.leaves.pull(self.boundary.outputs, cotangents, keep=self.older)  # type: ignore[union-attr]

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
