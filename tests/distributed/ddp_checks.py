"""Every check that runs in two processes, by name; one fast case of each, the rest slow."""

import itertools

import ddp_more as m
import ddp_ranks as r
import ddp_tuned as t
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
    **each(w.no_sync, *((*both, o) for both in BOTH for o in ("plain", "unused", "views"))),
    **each(w.aux_with_a_graph, *((e,) for e in ENGINES)),
    **each(w.trace_elsewhere, *BOTH),
    **each(w.inside, *((*both, o) for both in BOTH for o in ("plain", "unused", "static"))),
    **each(w.comm_hook, *BOTH),
    **each(w.module_hook, *BOTH),
    **each(w.functions),
    **each(w.refusals),
    **each(w.threads),
    **each(r.seeds, *itertools.product(ENGINES, ("wrapper", "inner"))),
    **each(r.entries),
    **each(r.silence),
    **each(r.once),
    **each(r.numbers),
    **each(r.resumed, ("own",), ("first",)),
    **each(r.out_of_step),
    **each(r.copies),
    **each(r.wrapped_later),
    **each(r.nonfinite, *BOTH),
    **each(r.steps_of_their_own),
    **each(m.averages),
    **each(m.group_of_some),
    **each(m.adversaries, *((e,) for e in ENGINES)),
    **each(m.uneven, *BOTH),
    **each(m.mixed, *itertools.product(FORMS, w.OPTIONS)),
    **each(m.added_up, *itertools.product(FORMS, w.OPTIONS)),
    **each(m.compiled, *itertools.product(FORMS, ("inside", "outside"))),
    **each(t.share, *((form,) for form in FORMS)),
    **each(t.tuned, *itertools.product(FORMS, ("wrapper", "inner"))),
    **each(t.joined),
    **each(t.skipped, ("share",), ("tuned",)),
}
GPU = [name for name in CHECKS if name.startswith(("gradient-", "options-"))]

FAST = [
    "share-lean",
    "tuned-scalar-wrapper",
    "tuned-lean-inner",
    "joined",
    "skipped-tuned",
    *(name for name in each(gradient, *GRADIENTS) if name.endswith("-hessian-seht-h")),
    "gradient-difference-batchnorm-scalar-ggn-seht-h",
    "gradient-difference-batchnorm-lean-hessian-seht-d",
    "gradient-difference-plain-scalar-hessian-seht-s",
    "gradient-autograd-batchnorm-lean-ggn-seht-d",
    "options-unused-difference-scalar",
    "options-unused-autograd-lean",
    "options-static-difference-lean",
    "options-static-autograd-scalar",
    "options-views-difference-lean",
    "captured-difference-scalar-ggn",
    "no-sync-difference-scalar-unused",
    "no-sync-autograd-lean-plain",
    "aux-with-a-graph-difference",
    "trace-elsewhere-difference-scalar",
    "inside-difference-lean-static",
    "inside-autograd-scalar-plain",
    "comm-hook-difference-scalar",
    "module-hook-difference-lean",
    "module-hook-autograd-scalar",
    "functions",
    "refusals",
    "threads",
    "seeds-difference-inner",
    "seeds-autograd-wrapper",
    "entries",
    "silence",
    "once",
    "numbers",
    "resumed-own",
    "out-of-step",
    "copies",
    "wrapped-later",
    "nonfinite-difference-scalar",
    "nonfinite-autograd-lean",
    "steps-of-their-own",
    "averages",
    "group-of-some",
    "adversaries-difference",
    "mixed-scalar-unused",
    "mixed-lean-static",
    "added-up-scalar-views",
    "added-up-lean-static",
]
assert not set(FAST) - set(CHECKS)
CHECKS |= each(r.fails_on_rank_1)
