"""Lightning Fabric: the penalty is a part of the state it saves, `training` tells it the length.

For a weight that is tuned give `training` held-out batches, as tuned_weight.py does.
Needs `pip install lightning-fabric`; run it with `python examples/fabric.py`.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import seht
from seht.integrations import log_values, training

EPOCHS = 2

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
data = TensorDataset(images[:1000], torch.tensor(digits.target[:1000]))

fabric = Fabric(accelerator="cpu")  # precision= and strategy= as you like
loader = fabric.setup_dataloaders(DataLoader(data, 50))


def build():
    fabric.seed_everything(0, verbose=False)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )
    penalty = seht.HessianTrace(model, weight=3e-4, curvature="ggn", warmup=0.4, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    return {"model": model, "optimizer": optimizer, "penalty": penalty}


def run(state, epochs):
    model, optimizer, penalty = state.values()
    with training(penalty, loader, EPOCHS, optimizer=optimizer):  # those of the whole training
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss = penalty(lambda: F.cross_entropy(model(x), y))
                fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                fabric.log_dict(log_values(penalty), step=penalty.step)


whole = build()
run(whole, EPOCHS)
print({name: float(f"{value:.3g}") for name, value in log_values(whole["penalty"]).items()})
with torch.inference_mode():
    logits = whole["model"].eval()(images[1000:])
    accuracy = (logits.argmax(1) == torch.tensor(digits.target[1000:])).float().mean()
print(f"test accuracy {accuracy:.3f}")

with tempfile.TemporaryDirectory() as folder:
    half = build()
    run(half, 1)
    fabric.save(Path(folder) / "run.ckpt", half)
    resumed = build()
    fabric.load(Path(folder) / "run.ckpt", resumed)
run(resumed, 1)
pairs = zip(whole["model"].parameters(), resumed["model"].parameters(), strict=True)
print("resumed run identical:", all(torch.equal(a, b) for a, b in pairs))
