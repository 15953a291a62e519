"""A plain loop, with accumulation, clipping, a schedule, evaluation and a resumed run.

`held_out=(batches, loss_fn)` in place of the weight tunes it, as tuned_weight.py does. Run it with
`python examples/plain.py`.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import seht
from seht.integrations import log_values

ACCUMULATE = 2

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train, test = slice(0, 1000), slice(1000, None)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    penalty = seht.HessianTrace(
        model, weight=3e-4, curvature="ggn", warmup=20, accumulate=ACCUMULATE, seed=0
    )
    return model, optimizer, schedule, penalty


def run(parts, epochs, verbose=False):
    model, optimizer, schedule, penalty = parts
    for epoch in epochs:
        model.train()
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(epoch))
        for step, rows in enumerate(order.split(50)):
            x, y = images[train][rows], labels[train][rows]
            loss = penalty(lambda: F.cross_entropy(model(x), y))
            (loss / ACCUMULATE).backward()
            if (step + 1) % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        if verbose:
            values = " ".join(f"{k} {v:.3g}" for k, v in log_values(penalty, "").items())
            print(f"epoch {epoch}: {values}")


@torch.inference_mode()
def accuracy(model):
    return (model.eval()(images[test]).argmax(1) == labels[test]).float().mean().item()


whole = build()
run(whole, range(4), verbose=True)
print(f"test accuracy {accuracy(whole[0]):.3f}, penalised calls {whole[3].guard.count}")

# The same run in two halves: the penalty's state is saved beside the others'.
with tempfile.TemporaryDirectory() as folder:
    first, second = build(), build()
    run(first, range(2))
    state = {"parts": [part.state_dict() for part in first], "random": torch.get_rng_state()}
    torch.save(state, Path(folder) / "run.pt")
    saved = torch.load(Path(folder) / "run.pt")
for part, part_state in zip(second, saved["parts"], strict=True):
    part.load_state_dict(part_state)
torch.set_rng_state(saved["random"])
run(second, range(2, 4))
pairs = zip(whole[0].parameters(), second[0].parameters(), strict=True)
print("resumed run identical:", all(torch.equal(a, b) for a, b in pairs))
