"""docs/images/two-minima.svg: the loss on the line between two trainings on wrong labels.

300 of scikit-learn's digits with 40 % of their labels drawn anew, from one start: plain, and with
the Gauss-Newton trace. A minute on one core.
"""

import copy

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from plots import OURS, PLAIN, save
from sklearn.datasets import load_digits
from torch import nn

import seht

torch.manual_seed(0)
torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images))
train, test = order[:300], order[300:]
x, right = images[train], labels[train]
drawn = torch.where(torch.rand(300) < 0.4, torch.randint(0, 10, (300,)), right)
start = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
)  # fmt: skip
EPOCHS, BATCH = 60, 50


def fit(weight):
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    steps = EPOCHS * (300 // BATCH)
    penalty = seht.HessianTrace(
        model, weight=weight, curvature="ggn", warmup=0.1, total_steps=steps, seed=0
    )
    torch.manual_seed(1)
    for _ in range(EPOCHS):
        for batch in torch.randperm(300).split(BATCH):
            optimizer.zero_grad()
            penalty(lambda: F.cross_entropy(model(x[batch]), drawn[batch])).backward()
            optimizer.step()
    return model


sharp, flat = fit(0.0), fit(1e-2)
line = copy.deepcopy(start)
shares = torch.linspace(-0.5, 1.5, 81).tolist()
losses: dict[str, list[float]] = {"training": [], "test": []}
with torch.no_grad():
    for share in shares:
        for p, a, b in zip(line.parameters(), sharp.parameters(), flat.parameters(), strict=True):
            p.copy_(a + share * (b - a))
        losses["training"].append(float(F.cross_entropy(line(x), drawn)))
        losses["test"].append(float(F.cross_entropy(line(images[test]), labels[test])))


def accuracy(model):
    with torch.no_grad():
        return float((model(images[test]).argmax(1) == labels[test]).float().mean())


figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
axes.plot(
    shares,
    losses["training"],
    color="#868e96",
    ls="--",
    label="training loss, 40 % of labels drawn anew",
)
axes.plot(shares, losses["test"], color="#212529", label="test loss, right labels")
for at, name, model, colour in ((0, "plain", sharp, PLAIN), (1, "penalised", flat, OURS)):
    axes.axvline(at, color=colour, lw=1, zorder=0)
    text = f"{name}: {100 * accuracy(model):.0f} % right on test data"
    axes.text(at, 4.1, text, color=colour, ha="center")
axes.set(ylim=(0, 4), xlabel="from the plain minimum (0) to the penalised one (1)", ylabel="loss")
axes.legend(loc="upper right")
save(figure, "two-minima.svg")
print(f"test accuracy: plain {accuracy(sharp):.3f}, penalised {accuracy(flat):.3f}")
