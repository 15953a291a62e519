r"""Traces of one (micro-)batch for measuring: perturbed forward passes, and no graph.

The value alone needs no gradient: with frozen decisions

.. math:: t \approx (L(w + es) + L(w - es) - 2 L(w)) / e^2

for each probe s, and :math:`z'^T H_{out} z'` with :math:`z' \approx (z(w + es) - z(w)) / e` for the
Gauss-Newton trace. What autograd would save on the way is dropped, so that a pass needs what plain
evaluation needs, plus the recorded decisions (one bit for each ReLU).

If the outputs are affine in each weight alone, the two traces are equal
(:mod:`seht.operators.affine`), and the cheaper one is computed.

One backward pass gives the trace of every weight at once (``per_layer``): scale the direction of
weight l by :math:`a_l = 1`; then :math:`\frac12 dt / da_l` has the expectation
:math:`\mathrm{tr}(H_{ll})`. That needs a graph, and with it a training step's memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seht import probes as draw
from seht.curvature.output_curvature import Curvature
from seht.distributed import LOCAL
from seht.engines.step_size import OF_LOSSES
from seht.errors import ExampleError
from seht.estimators import SehtH, SehtS
from seht.operators.affine import Affine, NotAffine
from seht.persample.memory import Memory
from seht.precision.half_weights import HALVES
from seht.replay.centre import Plan
from seht.replay.passes import Passes
from seht.task import Closure, Directions, Task
from seht.tensors.graph import coarser, leaves_of
from seht.tensors.graph_need import dropping, wants_graph
from seht.tensors.process import unshortened
from seht.tensors.random_state import RandomState
from seht.tensors.undo import uninterrupted

_Take = Callable[[Directions, list[Tensor], list[Tensor], list[Tensor]], None]


@dataclass(frozen=True)
class Replicates:
    """Independent estimates of one batch's trace."""

    loss: float
    traces: tuple[float, ...]
    """One for each probe."""
    layers: dict[str, tuple[float, ...]]
    """With ``per_layer``: the same for each weight."""
    shared: tuple[str, ...]
    """Weights with one direction for all examples."""
    unused: tuple[str, ...]
    """Weights that the loss does not depend on."""
    n: int | None
    """The number of examples, where each had a probe of its own."""
    affine: bool = False
    """Whether the Hessian's trace was taken from the Gauss-Newton matrix, whose trace is equal."""

    def table(self, names: Iterable[str] = ()) -> Tensor:
        """In float64, a row for each: the trace, and the shares of the weights of these names."""
        nothing = (0.0,) * len(self.traces)
        columns = [self.traces, *(self.layers.get(name, nothing) for name in names)]
        return torch.tensor(columns, dtype=torch.float64).T


def replicates(
    model: nn.Module,
    closure: Closure,
    *,
    probes: int = 2,
    seed: int = 0,
    estimator: SehtH | SehtS | None = None,
    params: draw.ParamSpec = None,
    curvature: str = "hessian",
    boundary: str | None = None,
    per_layer: bool = False,
    stretch: float = 1.0,
    memory: Memory | None = None,
) -> Replicates:
    """Estimate the trace of the closure's loss with ``probes`` independent probes.

    With the default estimator, :class:`seht.SehtS`, every example has a probe of its own, and the
    part that examples share is drawn anew for each replicate. Raises
    :class:`seht.ExampleError` where the examples meet before the loss; ``estimator=seht.SehtH()``
    takes one probe for all instead. The step is ``stretch`` times the usual one. Give one
    ``memory`` to all calls for a model: it keeps what was found out about the closure. Weights,
    buffers and gradients are left as they were, the global random state where one run of the
    closure leaves it.
    """
    drawn = dataclasses.replace(SehtS() if estimator is None else estimator, probes=probes)
    chosen = draw.choose(model, params)
    task = Task.to_measure(model, closure, chosen, drawn, seed, curvature, boundary)
    memory = memory or Memory()
    with torch.inference_mode(False), torch.enable_grad(), uninterrupted(), unshortened():
        random = RandomState(model.parameters())
        start = random.read()
        try:
            return _either(task, per_layer, stretch, memory)
        except RuntimeError as error:
            if memory.graph or not wants_graph(error):
                raise
        memory.needs_graph()  # the closure takes gradients itself
        random.begin(start)
        return _either(task, per_layer, stretch, memory)


def _either(task: Task, per_layer: bool, stretch: float, memory: Memory) -> Replicates:
    """By the Gauss-Newton matrix if it has the same trace, otherwise by the Hessian."""
    if task.curvature == "hessian" and task.examples and memory.affine is not False:
        found = _affinely(task, per_layer, stretch, memory)
        memory.tried_affine(found is not None)
        if found is not None:
            return found
    return _measured(task, per_layer, stretch, memory)


def _affinely(task: Task, per_layer: bool, stretch: float, memory: Memory) -> Replicates | None:
    """The replicates by the Gauss-Newton matrix; None if its trace is not the Hessian's."""
    watch = Affine(task.weights.values())
    other = dataclasses.replace(task, curvature="ggn", closure=watch.around(task.closure))
    random = RandomState(task.model.parameters())
    start = random.read()
    try:
        found = _measured(other, per_layer, stretch, memory, watch)
    except (NotAffine, RuntimeError, TypeError, ValueError) as error:
        mine = isinstance(error, NotAffine)
        if isinstance(error, ExampleError) or (error is watch.raised and not mine):
            raise
        random.begin(start)  # it may still do without G
        return None
    return dataclasses.replace(found, affine=True)


def _measured(
    task: Task, per_layer: bool, stretch: float, memory: Memory, watch: Affine | None = None
) -> Replicates:
    with nullcontext() if per_layer or memory.graph else dropping() as saved:
        lean = task.curvature == "hessian" if per_layer else not memory.graph
        passes = LOCAL.passes(Plan(task, memory=memory, lean=lean, dropped=saved))
        if not passes.used:
            return _answer(passes, [0.0] * task.estimator.probes)
        if per_layer:
            return _with_layers(passes, stretch, watch, memory)
        if task.curvature == "ggn":
            return _gauss_newton(passes, stretch, watch, memory)
        return _hessian(passes, stretch)


def _step(passes: Passes, sigma: Directions, stretch: float) -> Tensor:
    dtype = next(iter(passes.used.values())).dtype
    curvature = passes.task.curvature
    if (curvature, dtype) not in OF_LOSSES or dtype in HALVES:
        raise TypeError(
            f"measuring needs float32 or float64 weights, not {dtype}; call model.float() first"
        )
    # The model may cast to less inside, and the loss is a difference's raw material here.
    dtype = coarser(coarser(dtype, passes.coarsest), passes.loss.dtype)
    return passes.weights.step(sigma, stretch * OF_LOSSES[curvature, dtype])


def _answer(passes: Passes, traces: list[float], layers: Any = None) -> Replicates:
    loss, found = float(passes.loss.detach()), layers or {}
    return Replicates(loss, tuple(traces), found, passes.shared, passes.unused, passes.examples)


def _hessian(passes: Passes, stretch: float) -> Replicates:
    loss = passes.loss.detach().double()
    passes.forget()
    traces = []
    for sigma in passes.task.probes():
        e = _step(passes, sigma, stretch)
        sides = [passes.value(sigma, side) for side in (e, -e)]
        traces.append((sides[0] + sides[1] - 2 * loss) / e**2)
    return _answer(passes, torch.stack(traces).tolist())


def _outputs(
    passes: Passes, watch: Affine | None, memory: Memory
) -> tuple[list[Tensor], Curvature]:
    """The centre's outputs and the loss's curvature in them."""
    assert passes.boundary is not None
    if watch is not None and not watch.holds(passes.boundary.origins):
        raise NotAffine
    z = list(passes.boundary.outputs)
    curvature = Curvature(passes.loss, z)
    passes.boundary.check(curvature.curved)
    if watch is None and not memory.curved:  # as the trace of the Hessian, 0 is an answer
        curvature.look(passes.loss, set(), third=False)
        memory.saw_curvature()
    behind = {id(leaf) for leaf in leaves_of([passes.loss], stop=z)}
    passes.tie(behind)
    if watch is not None and passes.tied:
        raise NotAffine
    return z, curvature


def _bent(
    passes: Passes,
    stretch: float,
    watch: Affine | None,
    memory: Memory,
    take: _Take,
    *,
    track: bool,
) -> None:
    """Hand ``take`` each probe s, while its pass is there: its outputs, Js and H_out Js."""
    assert passes.boundary is not None
    z, curvature = _outputs(passes, watch, memory)
    for sigma in passes.task.probes():
        e = _step(passes, sigma, stretch)
        with passes.at(sigma, e, track=track):
            above = list(passes.boundary.outputs)
            direction = curvature.direction(above, z, e)
            with passes.weights.back(sigma, e, passes.tied):
                product = curvature.product(direction)
            take(sigma, above, direction, product)


def _gauss_newton(
    passes: Passes, stretch: float, watch: Affine | None, memory: Memory
) -> Replicates:
    traces = []

    def take(_: Any, __: Any, direction: list[Tensor], product: list[Tensor]) -> None:
        pairs = zip(product, direction, strict=True)
        traces.append(torch.stack([(h * d).sum().double() for h, d in pairs]).sum())

    _bent(passes, stretch, watch, memory, take, track=False)
    return _answer(passes, torch.stack(traces).tolist())


def _with_layers(
    passes: Passes, stretch: float, watch: Affine | None, memory: Memory
) -> Replicates:
    task = passes.task
    layers: dict[str, list[float]] = {name: [] for name in passes.used}
    if task.curvature == "hessian":
        passes.forget()
        for sigma in task.probes():
            e = _step(passes, sigma, stretch)
            sides = [passes.gradient(sigma, side, []) for side in (e, -e)]
            for name in layers:
                layers[name].append(float((sides[0][name] - sides[1][name]) / (2 * e)))
    else:

        def take(sigma: Directions, above: list[Tensor], _: Any, product: list[Tensor]) -> None:
            for name, value in passes.pull_along(sigma, [], above, product).items():
                layers[name].append(float(value))

        _bent(passes, stretch, watch, memory, take, track=True)
    traces = list(map(math.fsum, zip(*layers.values(), strict=True)))
    return _answer(passes, traces, {name: tuple(v) for name, v in layers.items()})
