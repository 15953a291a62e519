"""The doctor on six models that nobody here wrote: a right verdict on each."""

import pytest
import strangers

import seht

EXPECTED = {
    "gpt2": ("lm_head", "untrained"),
    "llama": ("lm_head", "untrained"),
    "bert": ("classifier", "untrained"),
    "vit": (None, "untrained"),
    "lora": ("base_model.model.lm_head", "untrained"),
    "efficientnet": (None, "memorising"),
}
"""The boundary that is needed, and the regime."""


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_stranger(name):
    make, package = strangers.STRANGERS[name]
    if strangers.missing(package):
        pytest.skip(f"{package} is not installed")
    report = seht.doctor(*make(), budget=30)
    boundary, kind = EXPECTED[name]
    found = report.check.engines[report.engine]
    assert report.ok and found.verdict == "trusted" and found.own < 0.1, str(report)
    assert (report.choice.curvature, report.choice.boundary) == ("ggn", boundary)
    assert report.regime.kind == kind, str(report)
    assert all(cost.ratio for cost in report.costs.forms)
    assert boundary is None or f'boundary="{boundary}"' in report.lines[0]
