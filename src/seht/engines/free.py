r"""``kinks="free"``: the noise-stability objective, another penalty under its own name.

.. math:: \tfrac12 (L(w + e\sigma) + L(w - e\sigma)), \qquad e = \sqrt{2\lambda}

With decisions left free the step crosses the kinks, and the average over the noise is what is
minimised: the noise-stability objective of arXiv 2306.08553, with :math:`\lambda = e^2/2`. On
smooth networks it tends to :math:`L + \lambda\,\mathrm{tr}(H)` for small steps; on ReLU networks
it is *not* an estimate of that, whatever the step. Two passes, no centre: buffers and aux are those
of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from seht.precision.policy import Casts, Precision
from seht.replay.buffers import BorrowedBuffers
from seht.replay.checkpoints import checkpoints
from seht.replay.made_leaves import pairs
from seht.replay.mode import Generators
from seht.replay.replayer import extra_run
from seht.replay.weights import Weights
from seht.task import Estimate, Task, check_loss, report_unused, split
from seht.tensors.gradients import Gradient, add, times
from seht.tensors.graph import first_uses, handed_out, leaves_of, mark, quiet, refuse_older
from seht.tensors.random_state import RandomState


def noise_stability(task: Task, precision: Precision) -> Estimate:
    """The mean of the loss at both sides of every probe, its gradient waiting."""
    e = (2 * task.weight) ** 0.5
    share = 1 / (2 * task.estimator.probes)
    random = RandomState(task.model.parameters(), task.random)
    weights = Weights(task.weights)
    start = random.read()
    leaves: list[Tensor] = []
    made: list[Tensor] = []
    older = False
    total: Gradient = []
    device = next(iter(task.weights.values())).device
    mean = trace = torch.zeros((), dtype=torch.float64, device=device)
    output, end, commit = None, start, None
    others: list[nn.Module] = []
    for sigma in task.probes():
        for side in (e, -e):
            random.begin(start)
            buffers = BorrowedBuffers(task.model, others)
            try:
                with weights.moved(sigma, mean.new_tensor(side)):
                    since = mark()
                    own = Generators(random, again=commit is not None)
                    casts = Casts(precision, partial(BorrowedBuffers, task.model))
                    with buffers, own, casts, precision.run(), checkpoints():
                        result = _run(task.closure, again=commit is not None)
                    loss = check_loss(split(result)[0])
                    if commit is None:
                        output, commit, end = result, buffers.commit, random.end()
                        others = buffers.others
                        leaves, older = leaves_of([loss], since)
                        precision.check_leaves(leaves)
                        refuse_older(task.weights, [loss], since)
                        model = {id(p) for p in task.model.parameters()}
                        if any(id(leaf) not in model for leaf in leaves):
                            made = [v for v in first_uses([loss]) if id(v) not in model]
                    twins = {id(a): b for a, b in pairs(made, [loss], leaves)} if made else {}
                    ends = [twins.get(id(leaf), leaf) for leaf in leaves]
                    with quiet(ends):
                        part: Gradient = list(
                            torch.autograd.grad(loss, ends, retain_graph=older, allow_unused=True)
                        )
            finally:
                if commit is not None:
                    random.finish(end)
            along = sum(
                (g * sigma[n]).sum().double()
                for n, w in task.weights.items()
                for leaf, g in zip(leaves, part, strict=True)
                if leaf is w and g is not None
            )
            mean = mean + share * loss.detach().double()
            trace = trace + task.estimator.scale * share * along / side
            total = add(total, times(part, share))
    assert commit is not None
    reached = {id(leaf) for leaf in leaves}
    unused = report_unused(task, [n for n, w in task.weights.items() if id(w) not in reached])
    whole = handed_out(mean.to(loss.dtype), total, precision.targets(leaves))
    centre = mean - task.weight * trace
    return Estimate(centre, trace, output, unused, total=whole, commit=precision.committing(commit))


def _run(closure: Callable[[], object], *, again: bool) -> object:
    if not again:
        return closure()
    with extra_run():
        return closure()
