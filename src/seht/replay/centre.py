"""The plan of a difference estimate, and its centre pass: the closure at the weights as they are,
recorded. Everything is decided, or refused, before a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor

from seht.curvature.boundary import Boundary
from seht.curvature.cross_entropy import CrossEntropy
from seht.curvature.head_rules import Losses
from seht.curvature.unformed import KeepLogits, Unformed
from seht.errors import ExampleError
from seht.estimators import SehtS
from seht.operators.rules import KeepGraph
from seht.persample.errors import refuse_compiled
from seht.persample.layers import LAYERS
from seht.persample.memory import Memory, layouts
from seht.persample.tracking import ExampleTracker
from seht.precision.policy import Precision
from seht.replay.checkpoints import checkpoints
from seht.replay.mode import Setting
from seht.replay.prefix import Prefix
from seht.replay.recorder import Recorder
from seht.replay.state import BorrowedBuffers
from seht.replay.witness import Witness
from seht.task import Task, check_loss, refuse_parallel, refuse_scripted, split
from seht.tensors.graph import hooks_of, mark
from seht.tensors.graph_need import Dropped
from seht.tensors.random_state import RandomState

Logits = Literal["formed", "centre", "unformed"]


@dataclass(frozen=True)
class Plan:
    """How one task is computed."""

    task: Task
    precision: Precision = field(default_factory=Precision)
    memory: Memory = field(default_factory=Memory)
    """With per-sample probes: where the examples lie, as far as it is known."""
    lean: bool = False
    """Every pass is differentiated at once, and one graph lives at a time."""
    prefix: bool = False
    """What comes before the first drawn weight is computed once."""
    watch: bool = False
    """The passes are compared, call by call."""
    logits: Logits = "formed"
    """Whether the network forms large logits: in every pass, at the centre alone, or in none."""
    dropped: Dropped | None = None
    """For measuring: nothing is kept for a backward pass, while this is on."""

    def __post_init__(self) -> None:
        refuse_scripted(self.task.modules, "difference")
        refuse_parallel(self.task.modules)
        if self.task.examples is not None:
            refuse_compiled(self.task.modules)

    @property
    def ggn(self) -> bool:
        """Whether the trace of the Gauss-Newton matrix is meant."""
        return self.task.curvature == "ggn"

    @property
    def held(self) -> bool:
        """Whether batch statistics are held, in passes that need the centre's graph."""
        return self.task.examples is not None and self.task.examples.coupling == "frozen"

    @property
    def drops(self) -> bool:
        """Whether the centre's graph is dropped as soon as it is differentiated."""
        return self.lean and self.task.differentiable

    @property
    def compact(self) -> bool:
        """Keep masks instead of outputs: less memory, where no graph holds the outputs anyway."""
        return self.lean or self.dropped is not None

    @property
    def sharp(self) -> bool:
        """Whether losses are taken in float64 where that costs nothing (``operators/losses.py``).
        The Gauss-Newton trace takes no difference of the loss's gradients.
        """
        return not self.ggn and not self.precision.native


Hidden = Callable[[], AbstractContextManager[Any]]
"""What surrounds a run of the closure, so that its mode does not see the calls of others."""


@dataclass(frozen=True)
class Centre:
    """The results of the centre pass: its record and its graph."""

    output: Any
    loss: Tensor
    roots: list[Tensor]
    """The ends of its graph: the loss, and the outputs where it was cut off there."""
    since: int
    """Nodes made by the closure have at least this number."""
    recorder: Recorder
    boundary: Boundary | None
    losses: Losses | None
    """For the Gauss-Newton trace, where large logits need not be formed."""
    terms: list[CrossEntropy] | None
    """The loss's curvature, where the network did not form them at the centre either."""
    tracker: ExampleTracker | None
    buffers: BorrowedBuffers
    hooks: list[dict[Any, Any]]
    """The user's backward hooks on modules."""
    random: RandomState
    start: list[Tensor]
    """The random state that every pass begins with ..."""
    end: list[Tensor]
    """... and the one that every pass leaves."""

    @property
    def hooked(self) -> bool:
        """Whether the user has hooks on gradients inside the network (``tensors/graph.py``)."""
        return bool(self.hooks) or self.recorder.hooked


def record(plan: Plan, hidden: Hidden = nullcontext) -> Centre:
    """Run the closure and record it. :class:`KeepGraph` says that the plan cannot be lean,
    :class:`KeepLogits` that the logits have to be formed.
    """
    task = plan.task
    random = RandomState(task.parameters) if task.random is None else task.random.for_passes()
    start = random.read()
    try:
        if task.examples is None:
            return _run(plan, hidden, random, start, mark())
        return _search(plan, task.examples, hidden, random, start)
    except (KeepGraph, KeepLogits):
        random.begin(start)
        raise


def _search(
    plan: Plan, estimator: SehtS, hidden: Hidden, random: RandomState, start: list[Tensor]
) -> Centre:
    """With per-sample probes: run the closure until the examples are found."""
    task, memory = plan.task, plan.memory
    failed: list[tuple[bool, int, bool, ExampleError]] = []
    for layout in layouts(estimator.batch_dim, memory):
        since = mark()
        tracker = ExampleTracker(
            task.model, task.weights, random, memory, layout, since, coupling=estimator.coupling
        )
        try:
            found = _run(plan, hidden, random, start, since, tracker)
        except ExampleError as error:
            failed.append((tracker.n > 0, tracker.calls, layout.leaves, error))
            random.begin(start)
            continue
        memory.located(layout)
        return found
    # The one that found examples, and came furthest, knows best.
    raise max(failed, key=lambda found: found[:3])[3]


def _run(
    plan: Plan,
    hidden: Hidden,
    random: RandomState,
    start: list[Tensor],
    since: int,
    tracker: ExampleTracker | None = None,
) -> Centre:
    task, precision = plan.task, plan.precision
    boundary = None
    if plan.ggn:
        boundary = Boundary(task, cut=plan.lean, dropped=plan.dropped, tracker=tracker)
    losses = None
    if plan.logits != "formed":
        losses = Losses(waiting=not (plan.drops and plan.ggn), same=plan.ggn)
    prefix = None
    if plan.prefix and tracker is None:
        prefix = Prefix({id(w) for w in task.weights.values()})
    setting = Setting(
        random,
        precision,
        partial(BorrowedBuffers, task.model),
        plan.compact,
        plan.sharp,
        None if tracker is None else LAYERS,
    )
    with BorrowedBuffers(task.model, modules=task.modules) as buffers:
        own = [buffers.clones] if boundary is None else [buffers.clones, boundary.given]
        cut = plan.drops and plan.ggn
        recorder = Recorder(
            setting,
            Witness(since, own) if plan.watch else None,
            heads=None if losses is None else losses.rules(unformed=plan.logits == "unformed"),
            lean=plan.drops,
            cut=cut,
            prefix=prefix,
            tracker=tracker,
        )
        with (
            nullcontext() if tracker is None else tracker.watching(),
            boundary or nullcontext(),
            hidden(),
            recorder,
            precision.run(),
            checkpoints(),
        ):
            output = task.closure()
    loss = check_loss(split(output)[0])
    if tracker is not None:
        tracker.finish(loss)
    roots, terms = [loss], None
    if losses is not None:
        losses.close(split(output)[1])
    if boundary is not None:
        if recorder.cut and any(z.grad is not None for z in boundary.outputs):
            raise KeepGraph  # the closure has called backward
        roots += boundary.settle(loss)
        terms = _terms(losses, loss, boundary.outputs)
    hooks = hooks_of([*task.modules, *buffers.modules_beside])
    if hooks or recorder.hooked:
        if recorder.lean:  # on a module that the closure calls besides
            raise KeepGraph
        if plan.logits == "unformed":
            raise KeepLogits
        precision.hear()
    return Centre(
        output, loss, roots, since, recorder, boundary, losses, terms, tracker, buffers, hooks,
        random, start, random.end(),
    )  # fmt: skip


def _terms(losses: Losses | None, loss: Tensor, outputs: list[Tensor]) -> list[CrossEntropy] | None:
    """Unformed logits are enough where the loss is cross-entropy of them, and nothing else."""
    if not any(isinstance(t, Unformed) for t in outputs):
        return None
    found = None
    if losses is not None and len(outputs) == 1:
        found = losses.terms(loss, outputs[0])
    if found is None:
        raise KeepLogits
    return found
