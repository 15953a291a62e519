"""``print(result)`` is a table or a line for people, of every result there is."""

import dataclasses
import inspect

import pytest
from curved_problems import data, loss_fn, network

from seht import measure
from seht.measure.survey import PARTS, Subject, SurveyPlan, survey


@pytest.fixture(scope="module")
def findings():
    subject = Subject("mine", network(), loss_fn, data())
    return survey(subject, SurveyPlan(parts=PARTS, few=48, points=5))


def results():
    """Every class of results that users can get hold of."""
    found = [value for name, value in vars(measure).items() if name.endswith("Result")]
    return [*found, measure.Layer, measure.Tracked]


def test_no_result_prints_as_a_raw_dataclass():
    assert len(results()) >= 8
    for kind in results():
        assert dataclasses.is_dataclass(kind) and inspect.isclass(kind)
        assert "__str__" in vars(kind), f"{kind.__name__} prints as a raw dataclass"


def test_eigenvalues_print_as_a_table(findings):
    found = findings.eigenvalues
    title, head, rule, *rows = str(found).splitlines()
    assert (
        title.startswith("eigenvalues of the Hessian (") and f"{found.products} products" in title
    )
    assert head.split() == ["eigenvalue", "error", "at", "most"] and set(rule) == {"-"}
    assert len(rows) == len(found.largest) + len(found.smallest)
    for number, value in enumerate(found.largest):
        name, place, said, _ = rows[number].split()
        assert (name, place) == ("largest", str(number + 1))
        assert float(said.replace("−", "-").replace(",", "")) == pytest.approx(value, rel=1e-3)
    assert rows[len(found.largest)].startswith("smallest 1")
    short = dataclasses.replace(found, largest=(), largest_residuals=(), converged=False)
    assert "not all were found" in str(short) and "largest" not in str(short)


def test_the_others_print_their_figures(findings):
    for result in vars(findings).values():
        if result is None or isinstance(result, str):
            continue
        text = str(result)
        assert type(result).__name__ not in text and "=(" not in text and "tensor" not in text
        assert max(map(len, text.splitlines())) < 240
    assert "±" in str(findings.sharpness) and "adversarial" in str(findings.sharpness)
    assert len(str(findings.landscape).splitlines()) == 3 + len(findings.landscape.steps)
    assert len(str(findings.plane).splitlines()) == 3 + len(findings.plane.steps)
    assert "tr(H), by quadrature" in str(findings.density)
    assert "mean trace of the Hessian" in str(findings.bound)
    assert str(findings).splitlines()[0].strip() == "mine"
    (layer, *_) = findings.trace.layers.values()
    assert f"({layer.weights:,} weights)" in str(layer)
    assert str(measure.Tracked(3, findings.trace)).startswith("step 3: tr(H) = ")
