r"""The trace of the Hessian of a whole data set's mean loss, with an honest error.

:math:`\mathrm{tr}(H) = \frac1N \sum_n \mathrm{tr}(H_n)`: the mean over examples, each with a probe
of its own where the loss allows it. The data is read in micro-batches; in each, ``probes``
independent replicates are drawn, whose spread gives the standard error *over probes given the data*
(:mod:`seht.measure.stats`). The spread between examples is no error of this quantity.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import Unpack

from seht.measure.objective import CurvatureOptions, LossFn
from seht.measure.readings import read
from seht.measure.results import TraceResult


def trace(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    tol: float | None = None,
    probes: int | None = None,
    per_layer: bool = False,
    method: str = "auto",
    **options: Unpack[CurvatureOptions],
) -> TraceResult:
    """Measure tr(H) of the mean loss over ``data``, with its standard error.

    tr(H) = 1/N Σ tr(Hₙ) over N examples, each with random probes sₙ of its own if the loss allows
    it: the mean of sₙᵀ Hₙ sₙ (Hutchinson, Communications in Statistics 19, 1990).

    Example:
        ```python
        result = seht.measure.trace(model.eval(), loss_fn, loader, tol=0.1)
        print(result.estimate, result.stderr, result.interval())
        ```

    Cost: about three forward passes over the data for each replicate, and one more; one and a half
    for each if the outputs are affine in every single weight tensor (linear layers, ReLU, pooling).

    The model is measured in the mode it is in; usually you want ``model.eval()`` first. Weights,
    buffers, gradients, modes and random states are afterwards what they were, also after an
    exception or an interrupt.

    Args:
        model: the module; its weights are float32 or float64.
        loss_fn: ``loss_fn(model, batch)`` returns the *mean* loss of the batch, or ``(loss, aux)``.
        data: a tensor, or a tuple, list, dictionary or dataclass of tensors (one batch); a data
            set; or any other iterable of batches, each weighted by its number of examples.
        tol: go on until the standard error is this fraction of the estimate.
        probes: independent replicates for each micro-batch, 2 by default; with 1 the error is nan.
        per_layer: also measure the trace of each tensor's own block of the Hessian.
        method: ``"per-sample"`` probes, ``"shared"`` ones (one direction for each micro-batch, with
            many times the variance), or ``"auto"``: per-sample if the model keeps examples apart.
        options: what all measurements take (``curvature`` and ``boundary`` only some of them):

            - ``curvature``: ``"hessian"``, or ``"ggn"`` for the Gauss-Newton part;
            - ``boundary``: for ``"ggn"``, the name of the module whose outputs are the network's
              outputs, if it is not the model itself;
            - ``seed``: of all random numbers, 0 by default; the same seed gives the same result;
            - ``progress``: ``True`` for a line on standard error, or a function that takes a
              :class:`seht.measure.Progress`;
            - ``params``: which tensors, as in :class:`seht.HessianTrace`;
            - ``micro_batch``: cut batches into parts of this many examples;
            - ``batch_dim``: the dimension of the tensors that holds the examples, 0 by default;
            - ``limit``: read at most this many examples; ``sampling_stderr`` then says how far
              the result may be from that of all data.
    """
    found = read(
        model, loss_fn, data, tol=tol, probes=probes, per_layer=per_layer, method=method, **options
    )
    return found.result()
