"""Lightning's Trainer with the callback: the weights of a loop by hand, logged and resumed."""

import copy

import pytest
import runs
import torch
import torch.nn.functional as F

import seht

L = pytest.importorskip("lightning")
from lightning.pytorch.loggers.logger import Logger  # noqa: E402

from seht.integrations.lightning import SehtCallback  # noqa: E402


class Module(L.LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.net = runs.network()
        self.penalty = seht.HessianTrace(self.net, **{**runs.OPTIONS, **options})
        self.records, self.evaluated = [], 0

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch):
        loss = self.penalty(lambda: self.loss(batch))
        self.records.append(self.penalty.last)
        return loss

    def validation_step(self, batch):
        assert not torch.is_grad_enabled()
        before = self.penalty.state_dict()
        # A step that is shared with training may call the penalty here: it is the plain closure.
        self.log("val", self.penalty(lambda: self.loss(batch)))
        assert self.penalty.state_dict() == before
        self.evaluated += torch.is_inference_mode_enabled()

    def configure_optimizers(self):
        return runs.optimizer_of(self)


class Memory(Logger):
    """Keeps what it is given."""

    name = version = "memory"

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass


def trainer_of(tmp_path, callbacks=None, **options):
    options = {"max_epochs": runs.EPOCHS, "logger": False, **options}
    return L.Trainer(
        accelerator="cpu", callbacks=callbacks or [SehtCallback()], gradient_clip_val=runs.CLIP,
        accumulate_grad_batches=runs.ACCUMULATE, default_root_dir=tmp_path, log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("curvature", ["hessian", pytest.param("ggn", marks=pytest.mark.slow)])
@pytest.mark.supports("Lightning Trainer", section="frameworks", engine="difference")
def test_as_by_hand(tmp_path, curvature):
    truth, records = runs.by_hand(curvature=curvature)
    model, logger = Module(curvature=curvature), Memory()
    trainer = trainer_of(tmp_path, logger=logger)
    trainer.fit(model, runs.loader(), runs.loader())
    runs.assert_same(model.net.state_dict(), truth)
    assert model.records == records
    trainer.validate(model, runs.loader(), verbose=False)  # in inference mode, which fit is not
    assert model.evaluated
    logged = [row["seht/trace"] for row in logger.rows if "seht/trace" in row]
    assert logged == pytest.approx(
        [r.trace for r in records[1 :: runs.ACCUMULATE] if r.trace is not None]
    )
    names = {"seht/loss", "seht/penalty", "seht/penalty_over_loss", "seht/weight"}
    assert names <= logger.rows[0].keys()


@pytest.mark.supports("Lightning Trainer, resumed", section="frameworks", engine="difference")
def test_resumed(tmp_path):
    """In the middle of warm-up and of the engine's own adaptation."""
    options = {"estimator": "seht-d", "prob": 0.5, "layer_prob": 0.7}
    truth, records = runs.by_hand(**options)
    first = trainer_of(tmp_path, max_epochs=1)
    first.fit(Module(**options), runs.loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    second, model = trainer_of(tmp_path), Module(**options)
    second.fit(model, runs.loader(), ckpt_path=tmp_path / "half.ckpt")
    runs.assert_same(model.net.state_dict(), truth)
    assert model.records == records[len(records) // runs.EPOCHS :]


class Saves(L.Callback):
    """After the fourth epoch, in which the weight is tuned already."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 3:
            trainer.save_checkpoint(self.path)


def test_resumed_with_held_out_batches(tmp_path):
    """Lightning loads the penalty before the callback has brought them: the next one is next."""
    held_out = (runs.loader(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    path, found = tmp_path / "half.ckpt", []
    for checkpoint in (None, path):
        model = Module(weight=None, warmup=0)
        callbacks = [SehtCallback(held_out=held_out), Saves(path)]
        trainer = trainer_of(tmp_path, callbacks, max_epochs=6)
        trainer.fit(model, runs.loader(), ckpt_path=checkpoint)
        found.append((model.penalty.state_dict()["strength"], model.net.state_dict()))
    (whole, weights), (again, others) = found
    assert whole["kind"] == "tuned" and whole["read"] == 10
    assert str(whole) == str(again)
    runs.assert_same(others, weights)


def test_a_checkpoint_without_a_penalty(tmp_path):
    """A run may begin without one."""
    model = Module()
    before = copy.deepcopy(model.penalty.state_dict())
    SehtCallback().on_load_checkpoint(trainer_of(tmp_path), model, {})
    assert model.penalty.state_dict() == before


def test_a_module_without_a_penalty(tmp_path):
    model = Module()
    model.penalty = None
    with pytest.raises(TypeError, match=r"Module\.penalty, which is None; make one in __init__"):
        trainer_of(tmp_path).fit(model, runs.loader())


def test_accumulation_that_differs(tmp_path):
    with pytest.warns(seht.PenaltyWarning, match="accumulate=2"):
        trainer_of(tmp_path, fast_dev_run=1).fit(Module(accumulate=1), runs.loader())


def test_the_length_of_the_training(tmp_path):
    """Half of it is a warm-up; and one that never ends is said."""
    model = Module(warmup=0.5)
    trainer_of(tmp_path).fit(model, runs.loader())
    steps = len(model.records) // runs.ACCUMULATE
    found = [record.trace is not None for record in model.records[:: runs.ACCUMULATE]]
    assert found == [False] * (steps // 2) + [True] * (steps - steps // 2)
    short = Module(warmup=0.5)  # of 5 batches, whose last one Lightning takes for a step
    trainer_of(tmp_path, limit_train_batches=5).fit(short, runs.loader())
    assert short.penalty.schedule.total_steps == short.penalty.step == 5
    with pytest.warns(seht.PenaltyWarning, match="within the warm-up of 500"):
        trainer_of(tmp_path).fit(Module(warmup=500), runs.loader())


def test_held_out_data_without_its_loss(tmp_path):
    """As one writes it first: the loader alone."""
    callback = SehtCallback(held_out=runs.loader())
    with pytest.raises(TypeError, match=r"a pair \(batches, loss_fn\) .*, not DataLoader"):
        trainer_of(tmp_path, [callback]).fit(Module(), runs.loader())
