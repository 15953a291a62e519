"""The plan of one estimate: everything is decided, or refused, before the first pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from seht.persample.errors import refuse_compiled
from seht.persample.memory import Memory
from seht.precision.policy import Precision
from seht.task import Task, refuse_parallel, refuse_scripted
from seht.tensors.graph_need import Dropped

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
    """Whether large logits are formed: in every pass, at the centre alone, or in none."""
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
