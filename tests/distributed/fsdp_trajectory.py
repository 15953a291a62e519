"""Sharded training is the training of one process."""

import torch
from fsdp_problems import check, distance, half, make, sharded, train


def options_of(words):
    """`ggn`, `d`, `probes=3`, `limit=0.1` and the like, as arguments of HessianTrace."""
    known = {
        "hessian": {},
        "ggn": {"curvature": "ggn"},
        "two": {"curvature": "ggn", "two_sided": True},
        # Few weights are drawn: at the smallest step rounding alone comes near 1e-8.
        "d": {
            "estimator": "seht-d",
            "prob": 0.3,
            "layer_prob": 0.4,
            "weight": 0.1,
            "kappa": 1e-3,
        },
        "probes": {"probes": 2},
        "gaussian": {"distribution": "gaussian"},
        "limit": {"limit": 0.01},
        "skip": {"on_nonfinite": "skip"},
        "every": {"every": 3, "warmup": 2, "ramp": 5},
        "all": {"params": "*"},
    }
    found = {}
    for word in words:
        found |= known[word]
    return found


@check
def trajectory(kind, dtype, again="True", *words):
    """Twenty steps of two half batches are twenty steps of the whole one."""
    dtype = getattr(torch, dtype)
    options = options_of(words)
    if dtype == torch.float32:
        options.pop("kappa", None)
    reference = make(kind, dtype)
    floor = make(kind, dtype)
    model = sharded(reference, reshard_after_forward=again == "True")
    start = make(kind, dtype)
    theirs = train(reference, kind, dtype, 20, part=lambda data: data, **options)
    ours = train(model, kind, dtype, 20, part=half, **options)
    off = distance(model, reference)
    assert distance(reference, start) > 0.03, "the weights hardly moved: nothing was compared"
    assert [r.layers for r in ours] == [r.layers for r in theirs]
    assert [r.seed for r in ours] == [r.seed for r in theirs]
    if dtype == torch.float64:
        assert off < 1e-8, f"{off:.2e}"
        for a, b in zip(ours, theirs, strict=True):
            assert abs(a.loss - b.loss) < 1e-8 * abs(b.loss)
            assert (a.trace is None) == (b.trace is None)
            if a.trace is not None:
                assert abs(a.trace - b.trace) < 1e-5 * max(1, abs(b.trace))
                assert abs(a.penalty - b.penalty) < 1e-7
        return f"{off:.1e}"
    # What rounding does: one process, the examples of each batch in another order.
    train(floor, kind, dtype, 20, part=lambda data: tuple(t.flip(0) for t in data), **options)
    rounding = distance(floor, reference)
    assert off < 20 * rounding, f"{off:.2e}, where rounding alone gives {rounding:.2e}"
    return f"{off:.1e} (rounding alone: {rounding:.1e})"
