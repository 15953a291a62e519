"""One run: what it records, that it is repeatable, and that it goes on after being stopped."""

import csv
import json
import math

import pytest
import torch
from small import digits, outcome, pydocs, timeless, train
from stops import StopAt, Stopped, stopped_and_resumed

import seht
from seht.lab import checkpoint
from seht.lab.methods import METHODS, parse
from seht.lab.optimizers import rate
from seht.lab.progress import Bar, Events, Lines
from seht.lab.records import RunError
from seht.lab.training import Training, mix

IMAGES = [name for name, method in METHODS.items() if "image" in method.tasks]
METHOD_OPTIONS = {name: parse.options(name) for name in METHODS}


def test_a_run_is_recorded(tmp_path):
    recipe = digits(**{"epochs": "12", "optim.lr": "0.2", "model.width": "8"})
    result = train(recipe, "seht-h(warmup=0)", 0, tmp_path / "run")
    assert result.done and result.reason is None
    assert (result.epochs, result.steps) == (12, 48)
    for which in ("last", "best"):
        metrics = result.metrics[which]
        assert 0 <= metrics["test_top1"] <= metrics["test_top5"] <= 100
        assert metrics["test_loss"] > 0 and metrics["valid_loss"] > 0
    assert result.metrics["last"]["test_top1"] > 20  # chance is 10
    assert result.trace["estimate"] > 3 * result.trace["stderr"] > 0
    assert result.trace["probes"] == 10
    with open(tmp_path / "run" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == [str(n) for n in range(1, 13)]
    assert list(rows[0]) == [
        "epoch", "step", "seconds", "lr", "train_loss",
        "valid_loss", "valid_top1", "valid_top5", "trace", "penalty",
    ]  # fmt: skip
    assert all(float(row["trace"]) and float(row["penalty"]) for row in rows)
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds) and seconds[-1] > 0
    best = max(rows, key=lambda row: (float(row["valid_top1"]), -float(row["valid_loss"])))
    assert result.metrics["best"]["epoch"] == int(best["epoch"])
    assert result.metrics["best"]["valid_top1"] == float(best["valid_top1"])
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["method"] == "seht-h(warmup=0)" and config["recipe"]["epochs"] == 12
    assert {"seht", "torch", "python"} == config["versions"].keys()
    weights = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    norm = math.sqrt(sum(w.double().square().sum().item() for w in weights.values()))
    assert result.weight_norm == pytest.approx(norm)
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def test_the_same_seed_is_the_same_run_and_another_is_another(tmp_path):
    runs = [
        train(digits(), "mixup+dropout", seed, tmp_path / f"{i}")
        for i, seed in enumerate((0, 0, 1))
    ]
    first, again, other = (timeless(vars(run)) for run in runs)
    assert first == again
    assert first["metrics"] != other["metrics"]
    assert mix(0, 1) != mix(1, 0)


def test_all_methods_of_a_seed_start_at_the_same_weights(tmp_path):
    weights = [
        [
            w.clone()
            for w in Training(digits(), parse.parse(name), 3, device="cpu").model.parameters()
        ]
        for name in ("weight-decay", "seht-h", "dropout", "sam")
    ]
    for other in weights[1:]:
        for a, b in zip(weights[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("method", IMAGES)
def test_a_stopped_run_ends_as_if_it_had_not_been(method, tmp_path):
    """Stopped within the second of two epochs."""
    if "warmup" in METHOD_OPTIONS[method]:
        method += "(warmup=0)"  # the recipe's is longer than this run
    recipe = digits(epochs="2")
    undisturbed = train(recipe, method, 0, tmp_path / "a")
    assert undisturbed.done, undisturbed.reason
    resumed = stopped_and_resumed(recipe, method, tmp_path / "b", 6)
    assert timeless(vars(resumed)) == timeless(vars(undisturbed))
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")
    a, b = (torch.load(tmp_path / run / "model.pt", weights_only=True) for run in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("method", ["seht-d(prob=0.5)+dropout", "lookahead+label-smoothing"])
def test_text_goes_on_with_its_hidden_state(method, tmp_path):
    undisturbed = train(pydocs(), method, 0, tmp_path / "a")
    assert undisturbed.done, undisturbed.reason
    last = undisturbed.metrics["last"]
    assert last["valid_perplexity"] == pytest.approx(math.exp(last["valid_loss"]))
    steps = undisturbed.steps // 3
    stopped_and_resumed(pydocs(), method, tmp_path / "b", steps // 2, steps + 2)
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")


def test_the_training_loss_is_that_of_the_last_weights(tmp_path):
    """Like the validation loss: in eval mode, with the text's state carried on."""
    result = train(pydocs(**{"model.dropout": "0.5"}), "none", 0, tmp_path)
    training = Training(pydocs(), parse.parse("none"), 0, device="cpu")
    training.bare.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    model, hidden, total, count = training.bare.eval(), None, 0.0, 0
    for batch in training.data.eval_batches("train"):
        logits, hidden = model(batch.x, hidden)
        logs = logits.detach().log_softmax(-1).gather(-1, batch.y[..., None])
        total, count = total - logs.sum().item(), count + batch.y.numel()
    assert result.train_loss == pytest.approx(total / count, rel=1e-5)
    with open(tmp_path / "metrics.csv") as file:
        *_, last = csv.DictReader(file)
    assert result.train_loss < float(last["train_loss"])  # dropout, and weights that were worse


def test_no_checkpoint_before_its_time(tmp_path):
    with pytest.raises(Stopped):
        train(digits(), "none", 0, tmp_path, watch=StopAt(7), save_every=1000)
    assert not (tmp_path / "checkpoint.pt").exists()
    with pytest.raises(Stopped):
        train(digits(), "none", 0, tmp_path, watch=StopAt(7), save_every=0)
    assert (tmp_path / "checkpoint.pt").exists()


def test_a_diverged_run_is_a_result_with_a_reason(tmp_path):
    recipe = digits(**{"optim.lr": "1e30", "optim.schedule": "constant"})
    result = train(recipe, "none", 0, tmp_path)
    assert result.status == "failed" and not result.done
    assert "loss is" in result.reason and "epoch 1" in result.reason
    assert json.loads((tmp_path / "result.json").read_text())["reason"] == result.reason
    assert train(recipe, "none", 0, tmp_path) == result
    before = (tmp_path / "result.json").stat().st_mtime_ns
    assert train(recipe, "none", 0, tmp_path, retry=True).reason == result.reason
    assert (tmp_path / "result.json").stat().st_mtime_ns > before
    penalised = train(recipe, "seht-h(warmup=0)", 0, tmp_path / "seht")
    assert penalised.status == "failed" and "NonFiniteError" in penalised.reason


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_trace_that_overflows_is_left_out(tmp_path, monkeypatch, value):
    """Too strong a penalty leaves such weights behind, with a loss that is finite."""
    monkeypatch.setattr(seht, "hessian_trace", lambda *_, **__: torch.tensor(value))
    result = train(digits(epochs="1", spectrum="0", robustness="false"), "none", 0, tmp_path)
    assert result.done and result.trace is None and result.weight_norm > 0


def test_a_done_run_is_not_run_again(tmp_path):
    result = train(digits(), "none", 0, tmp_path)
    before = (tmp_path / "result.json").stat().st_mtime_ns
    assert train(digits(), "none", 0, tmp_path, watch=StopAt(1)) == result
    assert (tmp_path / "result.json").stat().st_mtime_ns == before


def test_without_a_validation_split_the_best_epoch_is_the_last(tmp_path):
    recipe = digits(**{"data.validation": "0", "robustness": "false"})
    result = train(recipe, "none", 0, tmp_path)
    assert result.metrics["best"] == {**result.metrics["last"], "epoch": 3}
    assert not any(name.startswith("valid") for name in result.metrics["last"])


def test_a_search_never_sees_the_test_set(tmp_path, monkeypatch):
    from seht.lab.data.examples import Examples

    asked = []
    real = Examples.eval_batches

    def watched(self, split, *a):
        asked.append(split)
        return real(self, split, *a)

    monkeypatch.setattr(Examples, "eval_batches", watched)
    train(digits(), "none", 0, tmp_path / "a", test=False)
    assert asked.count("test") == 0 and asked.count("valid") == 3
    train(digits(), "none", 0, tmp_path / "b")
    # The last weights, six times rounded or disturbed, and the best if they are others.
    assert asked.count("test") in (7, 8)
    assert "valid" not in asked[asked.index("test") :]  # nothing is chosen after it


# --- directories that are not this run's ------------------------------------------------------


def test_another_runs_directory_is_refused(tmp_path):
    train(digits(), "none", 0, tmp_path)
    for recipe, method, seed, words in (
        (digits(epochs="4"), "none", 0, "recipe.epochs is 3 there, 4 here"),
        (digits(), "mixup", 0, "method is 'none' there, 'mixup' here"),
        (digits(), "none", 1, "seed is 0 there, 1 here"),
    ):
        with pytest.raises(RunError, match=words):
            train(recipe, method, seed, tmp_path)


@pytest.fixture
def stopped(tmp_path):
    with pytest.raises(Stopped):
        train(digits(), "none", 0, tmp_path, watch=StopAt(6), save_every=0)
    return tmp_path / "checkpoint.pt"


def refused(path, words):
    before = path.read_bytes()
    with pytest.raises(RunError, match=words) as error:
        train(digits(), "none", 0, path.parent)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert path.read_bytes() == before
    assert not (path.parent / "result.json").exists()


def test_a_cut_checkpoint_is_refused(stopped):
    content = stopped.read_bytes()
    for length in (len(content) - 1, len(content) // 2, 100):
        stopped.write_bytes(content[:length])
        refused(stopped, "cut short or altered" if length > 150 else "checkpoint|cut short")
    stopped.write_bytes(content[:-5] + b"x" + content[-4:])
    refused(stopped, "cut short or altered")
    stopped.write_bytes(b"")
    refused(stopped, "not a checkpoint of this version")


def test_a_foreign_checkpoint_is_refused(stopped, tmp_path):
    checkpoint.save(stopped, {"epoch": 1}, "0" * 64)
    refused(stopped, "another recipe, method or seed")
    torch.save({"epoch": 1}, stopped)
    refused(stopped, "not a checkpoint of this version")


def test_a_checkpoint_with_code_in_it_is_not_run(stopped, tmp_path, monkeypatch):
    class Trap:
        def __reduce__(self):
            return (print, ("executed",))

    run = stopped.read_bytes().split(b"\n")[0].split(b" ")[2].decode()
    checkpoint.save(stopped, {"training": Trap()}, run)
    refused(stopped, "more than tensors and plain values")


def test_leftovers_of_a_killed_write_are_removed(tmp_path):
    tmp_path.joinpath("metrics.csv.part").write_text("half a li")
    train(digits(), "none", 0, tmp_path)
    assert not list(tmp_path.glob("*.part"))


# --- schedules --------------------------------------------------------------------------------


def rates(schedule, epochs=10, losses=(), **options):
    optim = digits(**{"optim.lr": "0.1", "optim.schedule": schedule, **options}).optim
    return [rate(optim, epochs, epoch, losses[:epoch]) for epoch in range(epochs)]


def torchs(make, epochs=10):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule, found = make(optimizer), []
    for _ in range(epochs):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_schedules_against_torchs():
    schedulers = torch.optim.lr_scheduler
    assert rates("cosine") == pytest.approx(
        torchs(lambda o: schedulers.CosineAnnealingLR(o, T_max=10))
    )
    assert rates("steps", **{"optim.milestones": "3,6", "optim.gamma": "0.2"}) == pytest.approx(
        torchs(lambda o: schedulers.MultiStepLR(o, [3, 6], 0.2))
    )
    assert rates("constant") == [0.1] * 10
    rising, falling = rates("onecycle")[:3], rates("onecycle")[3:]
    up = torchs(lambda o: schedulers.CosineAnnealingLR(o, T_max=3, eta_min=0.1 / 25))
    assert rising == pytest.approx([0.1 + 0.1 / 25 - lr for lr in up[:3]])
    down = torchs(lambda o: schedulers.CosineAnnealingLR(o, T_max=7))
    assert falling == pytest.approx(down[:7])


def test_the_plateau_divides_by_four_when_there_is_no_new_best():
    losses = [5.0, 4.0, 4.0, 3.0, 3.5, 3.4, 2.0]
    found = rates("plateau", 8, losses, **{"optim.gamma": "0.25"})
    assert found == pytest.approx([0.1 * 0.25**n for n in (0, 0, 0, 1, 1, 2, 3, 3)])


def test_the_run_uses_the_schedule(tmp_path):
    train(digits(**{"optim.lr": "0.1"}), "none", 0, tmp_path)
    with open(tmp_path / "metrics.csv") as file:
        found = [float(row["lr"]) for row in csv.DictReader(file)]
    assert found == pytest.approx(rates("cosine", 3))


# --- who watches ------------------------------------------------------------------------------


def test_lines_and_bar(tmp_path, capsys):
    train(digits(), "seht-h(warmup=0)", 0, tmp_path / "lines", watch=Lines("seht-h, seed 0"))
    out = capsys.readouterr().out
    assert "seht-h, seed 0: epoch 3/3, loss " in out and "trace" in out and "top-1" in out
    train(digits(), "seht-h", 0, tmp_path / "bar", watch=Bar("seht-h, seed 0"))
    out = capsys.readouterr().out
    assert "epoch 3/3" in out and "loss" in out and "valid" in out


def test_tensorboard_reads_the_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    undisturbed = train(digits(), "none", 0, tmp_path / "a")
    assert undisturbed.done
    stopped_and_resumed(digits(), "none", tmp_path / "b", 6)
    curves = []
    for run in "ab":
        (file,) = (tmp_path / run).glob("events.out.tfevents.*")
        events = EventAccumulator(str(file)).Reload()
        curves.append([(e.step, e.value) for e in events.Scalars("valid/loss")])
        assert "train/loss" in events.Tags()["scalars"]
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0]] == [1, 2, 3]


def test_events_of_an_epoch_without_figures(tmp_path):
    with Events(tmp_path) as events:
        events.add({"epoch": 1, "step": 3, "valid_loss": None, "train_loss": 1.0})
