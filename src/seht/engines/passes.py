"""The passes of one difference estimate: the centre records, the perturbed ones replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seht.engines.base import Directions, Probe, Task, check_loss, report_unused, split
from seht.engines.boundary import Boundary
from seht.engines.buffers import BorrowedBuffers
from seht.engines.checkpoints import checkpoints
from seht.engines.deferred import Deferred
from seht.engines.dropping import Dropped
from seht.engines.gradients import Gradient, dense, inner, sketch, times
from seht.engines.graph import (
    Take,
    handed_out,
    handing_over,
    leaves_of,
    mark,
    quiet,
    refuse_older,
)
from seht.engines.kinks.rules import KeepGraph
from seht.engines.persample.axes import every_tensor
from seht.engines.persample.errors import ExampleError, refuse_compiled
from seht.engines.persample.layers import LAYERS
from seht.engines.persample.memory import Memory, layouts
from seht.engines.persample.signs import Signs
from seht.engines.persample.tracking import Tracker
from seht.engines.precision import Casts, Precision
from seht.engines.replay import Prefix, Recorder, Replayer, extra_run
from seht.engines.state import RandomState, Weights
from seht.engines.witness import Witness, unrepeatable
from seht.hooks import hooks_of, muted


class Passes:
    """The centre pass of one task, and its perturbed passes.

    Every pass starts from the same random state and the same buffers, and sees the decisions of
    the centre; when the last has run, the random state is where the centre left it.
    """

    leaves: list[Tensor]
    """What the loss depends on."""
    used: dict[str, Tensor]
    unused: tuple[str, ...]
    hooked: bool
    """Whether the user looks at gradients inside the network (``hooks.py``)."""

    def __init__(
        self,
        task: Task,
        *,
        lean: bool = False,
        frozen: bool = True,
        prefix: bool = False,
        watch: bool = False,
        memory: Memory | None = None,
        dropped: Dropped | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.task = task
        self.precision = precision or Precision()
        self.frozen = frozen
        self.random = RandomState(task.model.parameters())
        self.tracker: Tracker | None = None
        self._dropped = dropped
        self._signs: tuple[Probe, Signs] | None = None
        kept = Prefix({id(w) for w in task.weights.values()}) if prefix else None
        self.start = self.random.read()
        self._watch = watch
        try:
            if task.per_sample:
                since = self._search(lean, memory or Memory())
            else:
                since = self._centre(lean, kept)
            self._listen()
        except KeepGraph:
            self.random.begin(self.start)
            raise
        self.end = self.random.read()
        self._survey(since)
        if not task.differentiable:  # the value needs no other gradient
            self.leaves = list(self.used.values())
        self.weights = self._own_weights()
        if self.tracker is not None:
            self.weights.still = {n for n in self.tracker.moving() if n in self.used}
        if kept is not None and not (not self.hooked and kept.intact() and self._before_all(kept)):
            self.recorder.prefix = None
        self.tied: list[str] = []
        """Drawn weights that the loss uses past the outputs (for the Gauss-Newton trace)."""
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}

    def _listen(self) -> None:
        """Look for hooks of the user's."""
        self._hooks = hooks_of([self.task.model, *self.buffers.others])
        self.hooked = self.precision.hooked = bool(self._hooks) or self.recorder.hooked
        if self.hooked and self.recorder.lean:  # on a module that the closure calls besides
            raise KeepGraph

    def _survey(self, since: int) -> None:
        """What the loss depends on, and which of the drawn tensors are among it."""
        task = self.task
        self.leaves, self.older = leaves_of(self._roots(), since)
        if self.boundary is not None:  # outputs that were cut off are no leaves of the user's
            cut = {id(z) for z in self.boundary.outputs}
            self.leaves = [leaf for leaf in self.leaves if id(leaf) not in cut]
        self.precision.check_leaves(self.leaves)
        reached = {id(leaf) for leaf in self.leaves}
        if self.older:
            refuse_older(task.weights, [self.loss], since)
        self.used = {n: w for n, w in task.weights.items() if id(w) in reached}
        self.unused = report_unused(task, [n for n in task.weights if n not in self.used])

    def _own_weights(self) -> Weights:
        return Weights(self.used)

    def _centre(
        self, lean: bool, prefix: Prefix | None = None, tracker: Tracker | None = None
    ) -> int:
        """Run the closure at the weights as they are, and record it."""
        self.buffers = BorrowedBuffers(self.task.model)
        self.recorder = Recorder(self.random, compact=lean, prefix=prefix)
        self.recorder.precision = self.precision
        self.recorder.borrowed = partial(BorrowedBuffers, self.task.model)
        self.boundary = Boundary(self.task) if self.task.curvature == "ggn" else None
        self.recorder.lean = lean and self.task.differentiable
        self.recorder.cut = self.recorder.lean and self.boundary is not None
        if self.boundary is not None:
            self.boundary.cut = lean
            self.boundary.tracker = tracker
            self.boundary.dropped = self._dropped
        self.recorder.packed = self._dropped is not None
        since = mark()
        if tracker is not None:
            self.recorder.tracker, self.recorder.layers = tracker.begin(since), LAYERS
        with self.buffers:
            if self._watch:
                self.recorder.witness = self._witness(since, self.buffers)
            watching = nullcontext() if tracker is None else tracker.watching()
            with (
                watching,
                self.boundary or nullcontext(),
                self._mode(self.recorder),
                self.precision.run(),
                checkpoints(),
            ):
                self.output = self.task.closure()
        self.loss = check_loss(split(self.output)[0])
        if tracker is not None:
            tracker.finish(self.loss)
        if self.boundary is not None:
            self.boundary.tracker = None
            if self.recorder.cut and any(z.grad is not None for z in self.boundary.outputs):
                raise KeepGraph  # the closure has called backward
            self.boundary.restrict(self.loss)
        return since

    def _search(self, lean: bool, memory: Memory) -> int:
        """The centre pass with per-sample probes: where are the examples?"""
        refuse_compiled(self.task.model)
        estimator: Any = self.task.estimator
        failed: list[tuple[int, ExampleError]] = []
        for layout in layouts(estimator.batch_dim, memory):
            tracker = Tracker(
                self.task.model, self.task.weights, self.random, memory, layout,
                coupling=estimator.coupling,
            )  # fmt: skip
            try:
                since = self._centre(lean, tracker=tracker)
            except ExampleError as error:
                failed.append((tracker.calls, error))
                self.random.begin(self.start)
                continue
            self.tracker, memory.layout = tracker, layout
            return since
        raise max(failed, key=lambda pair: pair[0])[1]  # the one that came furthest knows best

    @property
    def shared(self) -> tuple[str, ...]:
        """With per-sample probes: the used tensors that keep one direction for all examples."""
        if self.tracker is None:
            return ()
        return tuple(n for n in self.used if n not in self.weights.still)

    @property
    def held(self) -> bool:
        """Whether batch statistics are held. In the perturbed passes they are leaves; in the
        centre's graph they are not, and its gradients must not be compared with theirs.
        """
        return self.tracker is not None and self.tracker.holds

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
        found = Deferred.apply(
            self.precision,
            self.older or keeps_graph(self.output),
            inner,
            self.leaves,
            *self.targets,
        )
        leaves = list(found[len(inner) :])
        return list(found[: len(roots)]), [*leaves, *found[len(roots) : len(inner)]]

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
        return mode if self.frozen else Casts(self.precision, mode.borrowed)

    @contextmanager
    def at(
        self, sigma: Directions | None, step: Tensor | float = 0.0, *, track: bool = False
    ) -> Iterator[Any]:
        """Run the closure at w + step * sigma and yield its output while the weights are there.

        With per-sample probes ``track`` asks for the derivative in the step itself.
        """
        replayer = Replayer(self.recorder)
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
                if self.frozen:
                    replayer.finish(self.end)
                    self._watch = False  # one comparison is enough
                yield output
        finally:
            self.random.write(self.end)

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
        with self.at(None) as output:
            loss = check_loss(split(output)[0])
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
        scaled = self.precision.scaled(outputs, cotangents)
        if scaled is not None:
            cotangents, back = scaled
            give = take
            take = None if give is None else lambda place, g: give(place, g * back.to(g.dtype))
        handing = nullcontext(set[int]()) if take is None else handing_over(targets, take)
        with quiet(self.leaves), handing as taken:
            found = torch.autograd.grad(
                outputs, [*targets, *more], cotangents, retain_graph=keep, allow_unused=True
            )
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

    # What is different where the weights lie on several ranks (``sharded.py``).

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


def keeps_graph(output: Any) -> bool:
    """Whether the closure's aux leaves the graph in the user's hands."""
    return any(t.requires_grad for t in every_tensor(split(output)[1]))
