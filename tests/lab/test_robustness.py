"""Rounded and disturbed weights, and calibration, against computations of their own."""

import json

import comparisons
import numpy as np
import pytest
import torch
from small import digits, pydocs, train

from seht.lab.data import load as load_data
from seht.lab.data.examples import generator
from seht.lab.ending import disturbed, robustness
from seht.lab.evaluate import calibration_error, evaluate, tally
from seht.lab.methods.weights import exchanged
from seht.lab.models import CNN, build
from seht.lab.recipes import identity, recipe
from seht.lab.report import page
from seht.lab.report.load import load
from seht.lab.report.rows import build as rows_of
from seht.lab.report.table import comma_separated, markdown
from seht.measure.robustness import rounded


def by_hand(weight, bits):
    """Channel by channel and entry by entry: the nearest of the levels that there are."""
    top = 2 ** (bits - 1) - 1
    out = np.zeros_like(weight)
    for channel in range(len(weight)):
        scale = np.abs(weight[channel]).max() / top
        levels = [scale * level for level in range(-top, top + 1)]
        for place, value in np.ndenumerate(weight[channel]):
            out[channel][place] = min(levels, key=lambda level: abs(level - value))
    return out


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("shape", [(5, 7), (3, 2, 3, 3)])
def test_rounding_against_the_nearest_level(bits, shape):
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(bits))
    found = rounded(weight, bits)
    np.testing.assert_allclose(found.numpy(), by_hand(weight.numpy(), bits), rtol=1e-12, atol=1e-14)
    for channel in found:
        assert len(channel.unique()) <= 2**bits - 1
    torch.testing.assert_close(rounded(found, bits), found)  # what is rounded stays


def test_a_channel_of_zeros_stays():
    weight = torch.tensor([[0.0, 0.0], [1.0, -0.4]])
    assert torch.equal(rounded(weight, 3), torch.tensor([[0.0, 0.0], [1.0, -1 / 3]]))


def test_noise_has_the_size_it_says_and_is_the_seed_s():
    weight = 0.3 * torch.randn(200, 500, generator=torch.Generator().manual_seed(0))
    noise = disturbed(weight, 0.03, generator(1, "weight noise", 3)) - weight
    wanted = 0.03 * weight.square().mean().sqrt()
    assert noise.std() == pytest.approx(wanted.item(), rel=0.02)
    assert abs(noise.mean()) < 5 * wanted / noise.numel() ** 0.5
    again = disturbed(weight, 0.03, generator(1, "weight noise", 3)) - weight
    other = disturbed(weight, 0.03, generator(2, "weight noise", 3)) - weight
    assert torch.equal(noise, again) and not torch.equal(noise, other)


def test_weights_are_as_before_also_after_an_error():
    model = CNN(width=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    doubled = {n: 2 * w.detach() for n, w in model.named_parameters() if w.dim() >= 2}
    with pytest.raises(RuntimeError), exchanged(model, doubled):
        assert not torch.equal(model.linear.weight, before["linear.weight"])
        assert torch.equal(model.linear.bias, before["linear.bias"])
        raise RuntimeError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert robustness(model, lambda: float("nan"), 0) == {}


def test_a_run_s_columns(tmp_path):
    made = digits(**{"epochs": "12", "optim.lr": "0.2", "model.width": "8"})
    result = train(made, "weight-decay", 3, tmp_path)
    data = load_data(made, 3)
    model = build(made.model, data)
    trained = torch.load(tmp_path / "model.pt", weights_only=True)
    model.load_state_dict(trained)
    last = result.metrics["last"]

    def top1():
        return evaluate(model, data.eval_batches("test"), "image")["top1"]

    assert last["test_top1"] == pytest.approx(top1())
    with torch.no_grad():
        for bits in (8, 4, 3):
            for name, weight in model.named_parameters():
                if weight.dim() > 1:
                    weight.copy_(torch.from_numpy(by_hand(trained[name].numpy(), bits)))
            assert last[f"test_top1_{bits}bit"] == pytest.approx(top1(), abs=0.3)
        for share in (1, 3, 10):
            draw = generator(3, "weight noise", share)
            for name, weight in model.named_parameters():
                weight.copy_(trained[name])
                if weight.dim() > 1:
                    size = share / 100 * np.sqrt(np.mean(np.square(trained[name].numpy())))
                    weight += size * torch.randn(weight.shape, generator=draw, dtype=torch.float64)
            assert last[f"test_top1_noise{share}"] == pytest.approx(top1(), abs=0.3)
    assert abs(last["test_top1_8bit"] - last["test_top1"]) < 2
    assert not [name for name in result.metrics["best"] if "bit" in name or "noise" in name]
    assert 0 < last["test_ece"] < 100


def test_the_rise_that_the_trace_predicts(tmp_path):
    """Against the exact second derivatives of the tensors that are disturbed."""
    made = digits(**{"epochs": "12", "optim.lr": "0.2", "model.width": "4"})
    last = train(made, "weight-decay", 3, tmp_path).metrics["last"]
    data = load_data(made, 3)
    model = build(made.model, data)
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    model.double().eval()
    (batch,) = data.eval_batches("train", 200)
    total = 0.0
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue

        def loss(values, name=name):
            logits = torch.func.functional_call(model, {name: values}, batch.x.double())
            return torch.nn.functional.cross_entropy(logits, batch.y)

        block = torch.func.hessian(loss)(weight.detach()).flatten().view(weight.numel(), -1)
        total += weight.square().mean().item() * block.trace().item()
    for share in (1, 3, 10):
        predicted = last[f"train_rise_noise{share}_predicted"]
        assert predicted == pytest.approx((share / 100) ** 2 / 2 * total, rel=0.3)
    assert last["train_rise_noise1"] == pytest.approx(last["train_rise_noise1_predicted"], rel=1)
    assert last["train_rise_noise10"] > last["train_rise_noise3"] > 0


def test_text_and_what_can_be_left_out(tmp_path):
    result = train(pydocs(), "none", 0, tmp_path / "a")
    best = result.metrics["best"]
    assert best["test_perplexity_8bit"] == pytest.approx(best["test_perplexity"], rel=0.05)
    assert "test_perplexity_3bit" in best and "test_perplexity_8bit" not in result.metrics["last"]
    plain = train(digits(robustness="false"), "none", 0, tmp_path / "b")
    assert not [name for name in plain.metrics["last"] if "bit" in name or "noise" in name]
    search = train(digits(), "none", 0, tmp_path / "c", test=False)
    assert not [name for name in search.metrics["last"] if name.startswith("test")]
    assert not [name for name in search.metrics["last"] if "rise" in name]
    assert best["train_rise_noise10_predicted"] > 0
    assert "robustness" not in identity(recipe("digits"))


# --- calibration ------------------------------------------------------------------------------


def error_by_hand(probabilities, labels):
    """Guo et al.'s formula, bin by bin."""
    confidence, choice = probabilities.max(1), probabilities.argmax(1)
    right, total = choice == labels, 0.0
    for place in range(15):
        inside = (confidence > place / 15) & (confidence <= (place + 1) / 15)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return 100 * total


def test_calibration_against_its_formula_in_parts():
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(3000, 7, dtype=torch.float64, generator=draw)
    labels = torch.randint(7, (3000,), generator=draw)
    labels = torch.where(torch.rand(3000, generator=draw) < 0.5, logits.argmax(1), labels)
    parts = [tally(*part) for part in zip(logits.split(700), labels.split(700), strict=True)]
    wanted = error_by_hand(logits.softmax(1).numpy(), labels.numpy())
    assert calibration_error(torch.stack(parts).sum(0)) == pytest.approx(wanted, rel=1e-9)


def test_calibration_of_the_sure_and_of_the_honest():
    sure = torch.zeros(100, 4)
    sure[:, 0] = 50.0
    labels = torch.arange(100) % 4
    assert calibration_error(tally(sure, labels)) == pytest.approx(75.0)
    honest = torch.zeros(100, 4)
    assert calibration_error(tally(honest, labels)) == pytest.approx(0.0)


# --- the report -------------------------------------------------------------------------------


def test_the_report_has_them_as_columns(tmp_path):
    comparisons.comparison(tmp_path, ["weight-decay", "sam"], seeds=2)
    names = [f"test_top1_{what}" for what in ("8bit", "4bit", "3bit", "noise1", "noise10")]
    for file in tmp_path.glob("runs/*/*/result.json"):
        found = json.loads(file.read_text())
        found["metrics"]["last"] |= {"test_ece": 4.0, **dict.fromkeys(names, 71.0)}
        found["metrics"]["last"] |= {
            "train_rise_noise3": 0.1234 if found["seed"] else 0.1236,
            "train_rise_noise3_predicted": 0.0987,
        }
        file.write_text(json.dumps(found))
    table = rows_of(load(tmp_path))
    text = markdown(table)
    for words in ("at 4 bits", "with 10 % noise", "calibration error, %", "test loss", "71.00"):
        assert words in text
    header = comma_separated(table).splitlines()[0].split(",")
    assert {"last_test_top1", "last_test_ece", "last_test_top1_4bit"} <= set(header)
    shown = page.render(table)
    assert "What it buys" in shown
    for words in ("rise at 3 % noise", "by the trace", "0.1235", "0.0987", "r² tr(H)"):
        assert words in text
        assert words.replace("rise at ", "rise at\n").replace("by the ", "by the\n") in shown
    assert "rise at 1 % noise" not in text  # which has no figure
    assert table.ranked("last_test_top1_4bit")
