"""Accelerate: the penalty is registered for checkpointing, and `training` tells it the length.

For a weight that is tuned give `training` held-out batches, as tuned_weight.py does.
Needs `pip install accelerate`; run it with `python examples/accelerate_loop.py`.
"""

import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import seht
from seht.integrations import log_values, training

EPOCHS = 2

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
data = TensorDataset(images[:1000], torch.tensor(digits.target[:1000]))


def build():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    )
    penalty = seht.HessianTrace(
        model, weight=3e-4, curvature="ggn", warmup=0.4, accumulate=2, seed=0
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 50))
    accelerator.register_for_checkpointing(penalty)
    return accelerator, model, optimizer, loader, penalty


def run(accelerator, model, optimizer, loader, penalty, epochs):
    with training(penalty, loader, EPOCHS, optimizer=optimizer):  # those of the whole training
        for _ in range(epochs):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = penalty(lambda: F.cross_entropy(model(x), y))
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.log(log_values(penalty), step=penalty.step)


whole = build()
run(*whole, EPOCHS)
print({name: float(f"{value:.3g}") for name, value in log_values(whole[-1]).items()})
with torch.inference_mode():
    logits = whole[1].eval()(images[1000:])
    accuracy = (logits.argmax(1) == torch.tensor(digits.target[1000:])).float().mean()
print(f"test accuracy {accuracy:.3f}")

with tempfile.TemporaryDirectory() as folder:
    half = build()
    run(*half, 1)
    half[0].save_state(folder)
    resumed = build()
    resumed[0].load_state(folder)
run(*resumed, 1)
pairs = zip(whole[1].parameters(), resumed[1].parameters(), strict=True)
print("resumed run identical:", all(torch.equal(a, b) for a, b in pairs))
