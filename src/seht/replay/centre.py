"""The centre pass of a difference estimate: run and recorded, then looked at for what it used."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seht.curvature.boundary import Boundary
from seht.curvature.cross_entropy import CrossEntropy
from seht.curvature.head_rules import Losses
from seht.curvature.unformed import KeepLogits, Unformed
from seht.errors import ExampleError
from seht.operators.rules import KeepGraph
from seht.persample.errors import refuse_compiled
from seht.persample.layers import LAYERS
from seht.persample.memory import Memory, layouts
from seht.persample.signs import Signs
from seht.persample.tracking import Tracker
from seht.precision.policy import Precision
from seht.replay.buffers import BorrowedBuffers
from seht.replay.checkpoints import checkpoints
from seht.replay.prefix import Prefix
from seht.replay.recorder import Recorder
from seht.replay.weights import Weights
from seht.replay.witness import Witness
from seht.task import Probe, Task, check_loss, report_unused, split
from seht.tensors.deferred import Deferred
from seht.tensors.graph import coarsest, first_uses, leaves_of, mark, refuse_older
from seht.tensors.graph_need import Dropped
from seht.tensors.hooks import hooks_of
from seht.tensors.random_state import RandomState
from seht.tensors.shared_memory import refuse_others
from seht.tensors.trees import tensors


class Centre:
    """The centre pass of one task: its record, its graph, and the tensors its loss depends on."""

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
        prefix: bool = False,
        watch: bool = False,
        memory: Memory | None = None,
        dropped: Dropped | None = None,
        precision: Precision | None = None,
        types: bool = False,
        unformed: bool = False,
    ) -> None:
        self.task = task
        self.losses = Losses() if unformed else None
        """For the Gauss-Newton trace: large logits need not be formed."""
        self.terms: list[CrossEntropy] | None = None
        """The loss's curvature, where the centre did not form them either."""
        self.coarsest: torch.dtype | None = None
        """The least precise type on the way of the gradients, where it was asked for."""
        self._types = types
        self.precision = precision or Precision()
        self.random = RandomState(task.model.parameters(), task.random)
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
        except (KeepGraph, KeepLogits):
            self.random.begin(self.start)
            raise
        self.end = self.random.end()
        self._made: list[Tensor] = []
        """Leaves that are none of the model's, which later passes may make anew (``twins.py``)."""
        self._survey(since)
        if not task.differentiable:  # the value needs no other gradient
            self.leaves, self._made = list(self.used.values()), []
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
        roots = self._roots()
        self.coarsest = coarsest(roots) if self._types else None
        self.leaves, self.older = leaves_of(roots, since)
        if self.boundary is not None:  # outputs that were cut off are no leaves of the user's
            cut = {id(z) for z in self.boundary.outputs}
            self.leaves = [leaf for leaf in self.leaves if id(leaf) not in cut]
        model = {id(p) for p in task.model.parameters()}
        self._meet({id(leaf) for leaf in self.leaves} - model, roots)
        self.precision.check_leaves(self.leaves)
        reached = {id(leaf) for leaf in self.leaves}
        if self.older:
            refuse_older(task.weights, [self.loss], since)
        self.used = {n: w for n, w in task.weights.items() if id(w) in reached}
        self.unused = report_unused(task, [n for n in task.weights if n not in self.used])

    def _meet(self, others: set[int], roots: list[Tensor]) -> None:
        """Leaves that are none of the model's; they are rare."""
        if others:
            self._made = [leaf for leaf in first_uses(roots) if id(leaf) in others]
            refuse_others(self.task.weights, self._made)

    def _own_weights(self) -> Weights:
        return Weights(self.used)

    def _centre(
        self, lean: bool, prefix: Prefix | None = None, tracker: Tracker | None = None
    ) -> int:
        """Run the closure at the weights as they are, and record it."""
        self.buffers = BorrowedBuffers(self.task.model)
        compact = lean or self._dropped is not None
        self.recorder = Recorder(self.random, compact=compact, prefix=prefix)
        self.recorder.precision = self.precision
        self.recorder.borrowed = partial(BorrowedBuffers, self.task.model)
        self.boundary = Boundary(self.task) if self.task.curvature == "ggn" else None
        # The Gauss-Newton trace takes no difference of the loss's gradients.
        self.recorder.sharp = self.boundary is None and not self.precision.native
        self.recorder.lean = lean and self.task.differentiable
        self.recorder.cut = self.recorder.lean and self.boundary is not None
        if self.losses is not None:
            self.recorder.heads = self.losses.rules(unformed=self.recorder.cut)
        if self.boundary is not None:
            self.boundary.cut = lean
            self.boundary.tracker = tracker
            self.boundary.dropped = self._dropped
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
            self._settle_logits(self.boundary.outputs)
        return since

    def _settle_logits(self, outputs: list[Tensor]) -> None:
        """Unformed logits are enough where the loss is cross-entropy of them, and nothing else."""
        given = list(tensors(split(self.output)[1]))
        if not any(isinstance(t, Unformed) for t in (*outputs, *given)):
            return
        if self.losses is None or len(outputs) != 1 or any(isinstance(t, Unformed) for t in given):
            raise KeepLogits
        self.terms = self.losses.terms(self.loss, outputs[0])
        if self.terms is None:
            raise KeepLogits

    def _search(self, lean: bool, memory: Memory) -> int:
        """The centre pass with per-sample probes: where are the examples?"""
        refuse_compiled(self.task.model)
        estimator: Any = self.task.estimator
        failed: list[tuple[bool, int, bool, ExampleError]] = []
        for layout in layouts(estimator.batch_dim, memory):
            tracker = Tracker(
                self.task.model, self.task.weights, self.random, memory, layout,
                coupling=estimator.coupling,
            )  # fmt: skip
            try:
                since = self._centre(lean, tracker=tracker)
            except ExampleError as error:
                failed.append((tracker.n > 0, tracker.calls, layout.leaves, error))
                self.random.begin(self.start)
                continue
            self.tracker, memory.layout = tracker, layout
            return since
        # The one that found examples, and came furthest, knows best.
        raise max(failed, key=lambda found: found[:3])[3]

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
        return mode


def keeps_graph(output: Any) -> bool:
    """Whether the closure's aux leaves the graph in the user's hands."""
    return any(t.requires_grad for t in tensors(split(output)[1]))
