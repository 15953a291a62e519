"""HessianTrace: one seed, one probe, in every engine, dtype and wrapper."""

import pytest
import torch
from helpers import closure_of, every_engine, network, records
from torch import nn

import seht

WEIGHT = 0.01


@every_engine
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"probes": 3},
        {"distribution": "gaussian"},
        {"estimator": "seht-d", "prob": 0.3, "layer_prob": 0.7, "probes": 2},
        {"estimator": seht.SehtD(prob=0.2, layer_prob=0.9, rescale=True)},
    ],
    ids=str,
)
def test_the_seed_of_a_record_repeats_its_estimate(engine, options):
    model = network()
    closure = closure_of(model)
    penalty = seht.HessianTrace(model, weight=WEIGHT, engine=engine, accumulate=2, **options)
    repeated = 0
    for record in records(penalty, closure, 6):
        if record.trace is not None:
            again = seht.hessian_trace(model, closure, engine=engine, seed=record.seed, **options)
            assert again.item() == pytest.approx(record.trace, rel=1e-6)
            repeated += 1
    assert repeated > 2


@every_engine
def test_runs_with_one_seed_are_equal_and_others_differ(engine):
    model = network(norm=False)

    def traces(seed):
        penalty = seht.HessianTrace(model, weight=WEIGHT, seed=seed, engine=engine)
        return [r.trace for r in records(penalty, closure_of(model), 3)]

    assert traces(1) == traces(1)
    assert not set(traces(1)) & set(traces(2))
    assert len(set(traces(1))) == 3  # every step draws another probe


def test_without_a_seed_it_is_torch_s_which_is_not_consumed():
    torch.manual_seed(77)
    before = torch.get_rng_state()
    penalty = seht.HessianTrace(network(), weight=WEIGHT, seed=None)
    torch.manual_seed(77)
    assert seht.HessianTrace(network(), weight=WEIGHT).seed == penalty.seed == 3  # network() seeds
    torch.manual_seed(77)
    assert torch.equal(torch.get_rng_state(), before)
    model = network()
    torch.manual_seed(77)
    assert seht.HessianTrace(model, weight=WEIGHT).seed == 77
    assert torch.equal(torch.get_rng_state(), before)


@every_engine
def test_wrappers_and_dtypes_draw_the_same_probe(engine):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    plain, single = network(norm=False), network(norm=False, dtype=torch.float32)
    traces = []
    for model in (plain, Wrapper(plain), single):
        penalty = seht.HessianTrace(
            model, weight=WEIGHT, seed=9, engine=engine, params=["module.0.weight", "7.*"]
        )
        penalty(closure_of(model))
        assert penalty.last.layers == ("0.weight", "7.weight", "7.bias")
        traces.append(penalty.last.trace)
    assert traces[1] == traces[0]
    assert traces[2] == pytest.approx(traces[0], rel=0.02)
