"""Every check that runs in two processes, by name; one fast case of each, the rest slow."""

import itertools

import ddp_ranks as r
import ddp_wrappers as w
from ddp_common import ESTIMATORS, same, train
from helpers import network

ENGINES = ("difference", "autograd")
FORMS = ("scalar", "lean")
BOTH = tuple(itertools.product(ENGINES, FORMS))
CURVATURES = ("hessian", "ggn")


def gradient(engine, norm, form, curvature, estimator):
    """The mean over ranks of the single-process gradients, to 1e-6."""
    model, records = train(
        form=form, model=network(norm=norm == "batchnorm"), engine=engine, curvature=curvature,
        steps=2, **ESTIMATORS[estimator],
    )  # fmt: skip
    assert any(r.trace is not None for r in records)
    same(model)


GRADIENTS = [
    chosen
    for chosen in itertools.product(ENGINES, ("batchnorm", "plain"), FORMS, CURVATURES, ESTIMATORS)
    if chosen[-1] != "seht-s" or chosen[:2] == ("difference", "plain")
]


def each(check, *choices):
    """A check for every choice of its arguments."""
    return {
        "-".join([check.__name__.replace("_", "-"), *map(str, chosen)]): (check, chosen)
        for chosen in choices or [()]
    }


CHECKS = {
    **each(gradient, *GRADIENTS),
    **each(w.options, *((name, *both) for name in w.OPTIONS for both in BOTH)),
    **each(w.options, *(("static", *both, "ggn", "warmup") for both in BOTH)),
    **each(w.captured, *((*both, c) for both in BOTH for c in CURVATURES)),
    **each(w.no_sync, *BOTH),
    **each(w.aux_with_a_graph, *((e,) for e in ENGINES)),
    **each(w.trace_elsewhere, *BOTH),
    **each(w.inside, *BOTH),
    **each(w.comm_hook, *BOTH),
    **each(w.functions),
    **each(w.refusals),
    **each(w.threads),
    **each(r.seeds, *itertools.product(ENGINES, ("wrapper", "inner"))),
    **each(r.entries),
    **each(r.silence),
    **each(r.once),
    **each(r.resumed, ("own",), ("first",)),
    **each(r.out_of_step),
    **each(r.copies),
    **each(r.wrapped_later),
    **each(r.nonfinite, *BOTH),
    **each(r.steps_of_their_own),
}
FAST = tuple(CHECKS)
