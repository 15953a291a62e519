"""Lightning's Trainer: the penalty is a line in training_step, the callback logs and saves it.

For a weight that is tuned leave `weight` out and write `SehtCallback(held_out=(batches, loss_fn))`,
as tuned_weight.py does.
Needs `pip install lightning`; run it with `python examples/lightning_trainer.py`.
"""

import logging
import tempfile

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import seht
from seht.integrations.lightning import SehtCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
        )
        self.penalty = seht.HessianTrace(
            self.net, weight=3e-4, curvature="ggn", warmup=5, accumulate=2, seed=0
        )

    def training_step(self, batch):
        x, y = batch

        def closure():  # runs more than once: what should come out is returned beside the loss
            logits = self.net(x)
            return F.cross_entropy(logits, y), logits

        loss, logits = self.penalty(closure)
        self.log("accuracy", (logits.argmax(1) == y).float().mean())
        return loss

    def validation_step(self, batch):
        x, y = batch
        self.log("val_accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
data = TensorDataset(images, torch.tensor(digits.target))
train = DataLoader(torch.utils.data.Subset(data, range(1000)), 50)
val = DataLoader(torch.utils.data.Subset(data, range(1000, 1797)), 200)


def fit(folder, epochs, checkpoint=None):
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        max_epochs=epochs, callbacks=[SehtCallback()], logger=CSVLogger(folder), accelerator="cpu",
        accumulate_grad_batches=2, gradient_clip_val=1.0, log_every_n_steps=5,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Digits()
    trainer.fit(model, train, val, ckpt_path=checkpoint)
    return trainer, model


with tempfile.TemporaryDirectory() as folder:
    trainer, whole = fit(folder, 2)
    for name, value in trainer.logged_metrics.items():
        print(f"{name} {value:.3g}")
    fit(folder, 1)[0].save_checkpoint(f"{folder}/half.ckpt")
    _, resumed = fit(folder, 2, f"{folder}/half.ckpt")
pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
print("resumed run identical:", all(torch.equal(a, b) for a, b in pairs))
