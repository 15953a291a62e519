"""What loggers are given, and that nobody pays for frameworks they do not use."""

import subprocess
import sys
import warnings

import pytest
from helpers import closure_of, network

import seht
from seht.integrations import check_accumulation, log_values


def test_every_kind_of_step():
    model = network()
    penalty = seht.HessianTrace(model, weight=1e-3, warmup=1, seed=0)
    assert log_values(penalty) == {}
    penalty(closure_of(model))
    plain = log_values(penalty)
    assert plain == {
        "seht/loss": penalty.last.loss, "seht/penalty": 0.0, "seht/penalty_over_loss": 0.0,
        "seht/weight": 0.0,
    }  # fmt: skip
    penalty(closure_of(model))
    values, last = log_values(penalty, ""), penalty.last
    assert values == {
        "loss": last.loss, "trace": last.trace, "penalty": last.penalty, "weight": 1e-3,
        "error": last.error, "penalty_over_loss": abs(last.penalty) / last.loss,
    }  # fmt: skip
    assert values["penalty_over_loss"] > 0
    assert all(type(value) is float for value in values.values())


def test_nothing_is_divided_by_a_loss_of_zero():
    model = network()
    penalty = seht.HessianTrace(model, weight=1e-3, warmup=1)
    penalty(lambda: 0 * closure_of(model)())
    assert "penalty_over_loss" not in log_values(penalty, "")


def test_accumulation_is_compared():
    penalty = seht.HessianTrace(network(), weight=1e-3, accumulate=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_accumulation(penalty, 2)
    with pytest.warns(seht.PenaltyWarning, match=r"accumulate=4\)"):
        check_accumulation(penalty, 4)


def test_frameworks_are_imported_by_those_who_ask():
    names = ["lightning", "lightning_fabric", "pytorch_lightning", "transformers", "accelerate"]
    code = (
        f"import sys, seht; print([n for n in {[*names, 'seht.integrations']} if n in sys.modules])"
    )
    code += f"; import seht.integrations; print([n for n in {names} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]
