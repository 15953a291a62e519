"""Methods as text: read, written, refused."""

import subprocess
import sys
from dataclasses import replace

import pytest
from training import IMAGE, TEXT, Trainer

from seht import HessianTrace
from seht.errors import PenaltyWarning
from seht.estimators import ESTIMATORS
from seht.lab.methods import METHODS
from seht.lab.methods.parse import options, parse, split_list


@pytest.mark.parametrize(
    ("text", "canonical", "slug"),
    [
        ("mixup", "mixup", "mixup"),
        (
            " seht-d( prob = 5e-2, probes=10 ) + label-smoothing ",
            "seht-d(probes=10,prob=0.05)+label-smoothing",
            "seht-d_probes=10_prob=0.05+label-smoothing",
        ),
        ("seht-h(curvature=ggn,weight=1e-3)", "seht-h(weight=0.001,curvature=ggn)", None),
        ("seht-d(rescale=True,limit=none)", "seht-d(rescale=true,limit=none)", None),
        ("htr-full(weight=1e+2)+sam", "htr-full(weight=100.0)+sam", None),
        ("sam()", "sam", "sam"),
    ],
)
def test_canonical_text(text, canonical, slug):
    spec = parse(text)
    assert spec.text == str(spec) == canonical
    assert parse(spec.text) == spec
    assert slug is None or spec.slug == slug


def test_slugs_tell_texts_apart():
    texts = [
        "seht-h", "seht-h(weight=0.001)", "seht-h(params=*)", "seht-h(params=a/*)",
        "seht-h(params=a_*)", "seht-h(params=A)", "seht-h(params=a)",
        f"seht-h(params={'x' * 200})", f"seht-h(params={'x' * 201})",
    ]  # fmt: skip
    slugs = [parse(text).slug for text in texts]
    assert len({slug.lower() for slug in slugs}) == len(texts)
    assert all(len(slug) < 120 and "/" not in slug and "*" not in slug for slug in slugs)


def test_a_list_is_split_outside_parentheses():
    assert split_list("a, b(c=1,d=2)+e ,f") == ["a", "b(c=1,d=2)+e", "f"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seth-d", "unknown method 'seth-d'; did you mean 'seht-d'"),
        ("seht-d(probe=3)", "seht-d: unknown option 'probe'; did you mean 'probes'"),
        ("none(x=1)", "none has no options, and 'x' was given"),
        ("seht-d(prob=0.7)", r"seht-d: prob must be in \(0, 0.5\]"),
        ("seht-d(prob=much)", "seht-d: prob must be a number, not 'much'"),
        ("seht-d(probes=1.5)", "seht-d: probes must be a whole number, not '1.5'"),
        ("seht-d(rescale=maybe)", "seht-d: rescale must be true or false"),
        ("seht-h(curvature=hesian)", "did you mean 'hessian'"),
        ("seht-h(weight=-1)", "seht-h: weight must be finite and not negative"),
        ("seht-h(engine=autograd,kappa=0.1)", "seht-h: .*kappa"),
        ("mixup(alpha=0)", "mixup: alpha must be a finite number above 0"),
        ("mixup(alpha=nan)", "mixup: alpha must be a finite number above 0"),
        ("dropout(rate=1)", r"dropout: rate must be in \[0, 1\)"),
        ("seht-d(prob)", "seht-d: cannot read option 'prob'; write option=value"),
        ("seht-d(prob=)", "cannot read option 'prob='"),
        ("seht-d(prob=0.1,prob=0.2)", "option prob is given twice"),
        ("seht-d+seht-d", "seht-d is given twice"),
        ("none+weight-decay", "none and weight-decay contradict each other; leave one out"),
        ("htr-full+htr-middle", "contradict each other"),
        ("seht-d(", "the parentheses in .* do not match"),
        ("seht-d)(", "the parentheses in .* do not match"),
        ("seht-d()x", "cannot read method"),
        ("seht-d+", "a method is missing in 'seht-d\\+'"),
        ("", "a method is missing"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_settings_go_before_defaults_and_the_user_before_both():
    recipe = replace(IMAGE, settings={"label-smoothing": {"weight": 0.25}, "cutout": {"size": "3"}})
    smoothing = [
        parse(text).build(r).smoothing
        for text, r in (
            ("label-smoothing", IMAGE),
            ("label-smoothing", recipe),
            ("label-smoothing(weight=1)", recipe),
        )
    ]
    assert smoothing == pytest.approx([0.1 / 1.1, 0.2, 0.5])
    (cutout,) = parse("cutout").build(recipe).methods
    assert cutout.size == 3


def test_a_wrong_setting_of_a_recipe_is_refused():
    recipe = replace(IMAGE, settings={"cutout": {"side": 3}})
    with pytest.raises(ValueError, match="cutout: unknown option 'side'; did you mean 'size'"):
        parse("cutout").build(recipe)


def test_a_method_for_images_is_refused_for_text():
    spec = parse("seht-d+mixup")
    assert spec.build(IMAGE)
    with pytest.raises(
        ValueError, match="mixup works on images, tables, series, features, and recipe"
    ):
        spec.build(TEXT)


def test_the_state_of_another_method_is_refused():
    method = parse("mixup+cutout").build(IMAGE)
    with pytest.raises(ValueError, match="belongs to mixup, not to cutout\\+mixup"):
        method.load_state_dict({"mixup": {}})


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_card(name):
    """Its docstring explains each of its options, and for a penalty the library's."""
    card = METHODS[name].__doc__
    assert len(card) > 60
    if name in ESTIMATORS:
        card += HessianTrace.__doc__
    for option in options(name):
        assert f"{option}: " in card or f"``{option}``" in card


def test_a_new_estimator_is_a_method_at_once():
    """Its own options, and the penalty's; the lab fills in the rest."""
    own = {"weight", "probes", "prob", "layer_prob", "rescale", "distribution"}
    shared = {"curvature", "params", "every", "warmup", "ramp", "limit", "engine", "on_nonfinite"}
    assert set(ESTIMATORS) <= set(METHODS)
    assert own | shared | {"kappa", "two_sided"} <= set(options("seht-d"))
    assert not {"model", "estimator", "seed", "total_steps", "accumulate"} & set(options("seht-d"))
    assert "coupling" in options("seht-s")


def test_weight_decay_and_dropout_change_the_recipe():
    assert parse("weight-decay(weight=0.1)").build(IMAGE).configure(IMAGE).optim.weight_decay == 0.1
    assert parse("weight-decay").build(IMAGE).configure(IMAGE) == IMAGE
    assert parse("none").build(IMAGE).configure(IMAGE).optim.weight_decay == 0
    assert parse("dropout").build(IMAGE).configure(IMAGE).model.dropout == 0.3
    assert parse("dropout(rate=0.5)").build(TEXT).configure(TEXT).model.dropout == 0.5


@pytest.mark.slow
def test_the_registry_does_not_import_the_optimisers():
    """They take seconds, and a method's name is all that most need."""
    code = "import sys, seht.lab.methods.parse; print('pytorch_optimizer' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_lengths_are_steps_or_fractions():
    for text, value in (("warmup=50", 50), ("warmup=0.1", 0.1), ("ramp=0.25", 0.25)):
        spec = parse(f"seht-h({text})")
        (given,) = spec.parts.values()
        assert given == {text.partition("=")[0]: value}
        assert type(next(iter(given.values()))) is type(value)
    with pytest.raises(ValueError, match=r"seht-h: warmup must be .* a fraction between 0 and 1"):
        parse("seht-h(warmup=1.5)")
    with pytest.raises(ValueError, match="seht-h: warmup must be a number, not 'soon'"):
        parse("seht-h(warmup=soon)")


def test_a_warm_up_as_long_as_the_training_is_said():
    with pytest.warns(
        PenaltyWarning, match=r"seht-h penalises nothing here.*seht-h\(warmup=0\.1\)"
    ):
        Trainer("seht-h(warmup=1000)", IMAGE)
