"""A tuned weight in the frameworks, whose adapters give held-out batches, steps and optimiser."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import seht

STEPS, EPOCHS = 8, 3
SAID = {"weight": seht.Tuning(gap=0.0), "curvature": "ggn", "warmup": 0.1, "seed": 0}
OPEN = {"warmup": 0.1, "seed": 0}
"""Nothing is said of the weight: held-out data make it a tuned one."""
generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(128, 5, generator=generator), torch.randint(0, 3, (128,), generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))


def loader(rows):
    return DataLoader(TensorDataset(X[rows], Y[rows]), 8)


TRAIN, OTHERS = slice(0, 8 * STEPS), slice(8 * STEPS, 128)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)


@pytest.fixture(scope="module", params=[SAID, OPEN], ids=["said", "open"])
def options(request):
    return request.param


@pytest.fixture(scope="module")
def by_hand(options):
    model = network()
    optimizer = optimizer_of(model)
    penalty = seht.HessianTrace(
        model, **{"weight": "tuned", **options}, total_steps=EPOCHS * STEPS, optimizer=optimizer,
        held_out=(loader(OTHERS), loss_fn),
    )  # fmt: skip
    for _ in range(EPOCHS):
        for batch in loader(TRAIN):
            optimizer.zero_grad()
            penalty(lambda: loss_fn(model, batch)).backward()
            optimizer.step()
    assert len(set(penalty.path.weights)) > 2 or options is OPEN
    return penalty.path


def test_lightning(by_hand, options, tmp_path):
    lightning = pytest.importorskip("lightning")
    from seht.integrations.lightning import SehtCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.penalty = seht.HessianTrace(self.net, **options)

        def training_step(self, batch):
            return self.penalty(lambda: loss_fn(self.net, batch))

        def configure_optimizers(self):
            return optimizer_of(self)

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, callbacks=[SehtCallback(held_out=(loader(OTHERS), loss_fn))],
        accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader(TRAIN))
    assert module.penalty.path == by_hand


def test_fabric(by_hand, options):
    runner = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu")
    model = network()
    model, optimizer = runner.setup(model, optimizer_of(model))
    penalty = seht.HessianTrace(
        model, **options, total_steps=EPOCHS * STEPS, optimizer=optimizer,
        held_out=(runner.setup_dataloaders(loader(OTHERS)), loss_fn),
    )  # fmt: skip
    for _ in range(EPOCHS):
        for batch in loader(TRAIN):
            optimizer.zero_grad()
            runner.backward(penalty(lambda: loss_fn(model, batch)))
            optimizer.step()
    assert penalty.path == by_hand


def test_accelerate(by_hand, options):
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = network()
    model, optimizer, others = accelerator.prepare(model, optimizer_of(model), loader(OTHERS))
    penalty = seht.HessianTrace(
        model, **options, total_steps=EPOCHS * STEPS, optimizer=optimizer,
        held_out=(others, loss_fn),
    )  # fmt: skip
    for _ in range(EPOCHS):
        for batch in loader(TRAIN):
            optimizer.zero_grad()
            accelerator.backward(penalty(lambda: loss_fn(model, batch)))
            optimizer.step()
    assert penalty.path == by_hand


def hugging_face_run(folder, options, resume=None, **more):
    """A penalty that has trained, from a checkpoint or from the start; it stops where it saves."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from seht.integrations.huggingface import SehtTrainer

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, labels):
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    class InOrder(SehtTrainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class Stop(transformers.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            control.should_training_stop = True

    def rows(part):
        return [{"x": x, "labels": y} for x, y in zip(X[part], Y[part], strict=True)]

    model = Wrapped()
    penalty = seht.HessianTrace(model, **options, boundary="net")
    args = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=EPOCHS, per_device_train_batch_size=8,
        per_device_eval_batch_size=8, learning_rate=3e-3, lr_scheduler_type="constant",
        max_grad_norm=0.0, report_to="none", use_cpu=True, disable_tqdm=True,
        logging_strategy="no", **{"save_strategy": "no", **more},
    )  # fmt: skip
    trainer = InOrder(
        model=model, args=args, train_dataset=rows(TRAIN), held_out=rows(OTHERS), penalty=penalty,
        callbacks=[Stop()],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return penalty


def test_hugging_face(by_hand, options, tmp_path):
    path = hugging_face_run(tmp_path, options).path
    assert path.positions == by_hand.positions
    assert path.weights == pytest.approx(by_hand.weights, rel=1e-4)


def test_hugging_face_resumed(tmp_path):
    whole = hugging_face_run(tmp_path / "whole", SAID).path
    part = hugging_face_run(tmp_path / "part", SAID, save_strategy="steps", save_steps=15)
    assert part.step == 15
    assert hugging_face_run(tmp_path / "part", SAID, resume=True).path == whole


def test_held_out_data_for_a_given_weight_are_refused():
    penalty = seht.HessianTrace(network(), weight=1e-3)
    with pytest.raises(ValueError, match="weight='tuned'"):
        penalty.equip(held_out=(loader(OTHERS), loss_fn))
