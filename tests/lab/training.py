"""A training loop as small as possible, for tests of methods: what the runner does, no more."""

import io
from dataclasses import replace

import torch

from seht.lab import models, optimizers
from seht.lab.config import DataConfig, ModelConfig, OptimConfig, Recipe
from seht.lab.methods.base import Batch, Run
from seht.lab.methods.loss import cross_entropy, make_closure, outputs
from seht.lab.methods.parse import parse

IMAGE = Recipe(
    name="tiny-images",
    data=DataConfig("digits", validation=50),
    model=ModelConfig("resnet18", width=4),
    optim=OptimConfig(lr=0.2, schedule="constant"),
    batch=12,
    epochs=2,
)
TEXT = Recipe(
    name="tiny-text",
    data=DataConfig("pydocs", bptt=6),
    model=ModelConfig("lstm", embedding=8, hidden=8, layers=1),
    optim=OptimConfig(lr=3.0, momentum=0.0, weight_decay=0.0, schedule="constant", clip=1.0),
    batch=4,
    epochs=2,
)
RECIPES = {recipe.task: recipe for recipe in (IMAGE, TEXT)}
CLASSES = 5
SIDE = 8


def model_of(recipe):
    """Small: an image model has two blocks, one with a projection and one without."""
    config = recipe.model
    if recipe.task == "text":
        return models.RecurrentLM(
            config.name, vocabulary=CLASSES, embedding=config.embedding, hidden=config.hidden,
            layers=config.layers, dropout=config.dropout, init=0.5,
        )  # fmt: skip
    options = {"classes": CLASSES, "width": config.width, "dropout": config.dropout}
    if config.name == "wrn":
        return models.WideResNet(10, 1, **options)
    if config.name == "cnn":
        return models.CNN(size=SIDE, channels=3, **options)
    return models.ResNet((1, 1), **options)


def batches(recipe, count=4, seed=7):
    """Examples that can be learnt: each class has its own picture, each word its successor."""
    generator = torch.Generator().manual_seed(seed)
    if recipe.task == "text":
        rows = torch.randint(CLASSES, (1, recipe.batch), generator=generator)
        steps = torch.arange(count * recipe.data.bptt + 1)[:, None]
        tokens = (rows + 2 * steps) % CLASSES
        size = recipe.data.bptt
        pieces = [tokens[i * size : (i + 1) * size + 1] for i in range(count)]
        return [Batch(piece[:-1], piece[1:]) for piece in pieces]
    pictures = torch.randn(CLASSES, 3, SIDE, SIDE, generator=generator)
    made = []
    for _ in range(count):
        y = torch.randint(CLASSES, (recipe.batch,), generator=generator)
        noise = torch.randn(recipe.batch, 3, SIDE, SIDE, generator=generator)
        made.append(Batch(pictures[y] + 0.3 * noise, y))
    return made


class Trainer:
    """Model, method and optimiser of one run."""

    def __init__(self, text, recipe, seed=0, dtype=torch.float32):
        torch.manual_seed(seed)
        self.method = parse(text).build(recipe)
        self.recipe = self.method.configure(recipe)
        self.model = model_of(self.recipe).to(dtype)
        self.data = [
            replace(b, x=b.x.to(dtype) if b.x.is_floating_point() else b.x) for b in batches(recipe)
        ]
        self.method.setup(Run(self.recipe, self.model, CLASSES, len(self.data) * 6, seed))
        plain = optimizers.make(self.recipe.optim, self.model.parameters())
        self.optimizer = self.method.optimizer(plain)
        self.step = 0
        self.hidden = None

    def closure(self, batch):
        return make_closure(self.model, batch, self.method)

    def train(self, steps):
        self.model.train()
        losses = []
        for _ in range(steps):
            batch = replace(self.data[self.step % len(self.data)], hidden=self.hidden)
            objective = self.method.objective(self.closure(self.method.batch(batch, self.step)))

            def differentiate():
                loss, aux = objective()
                loss.backward()
                if self.recipe.optim.clip is not None:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optim.clip)
                return aux

            self.optimizer.zero_grad()
            aux = differentiate()
            self.optimizer.step(*([differentiate] if self.method.passes > 1 else []))
            self.method.after_step()
            self.hidden = aux["hidden"]
            losses.append(aux["loss"].item())
            self.step += 1
        return losses

    def evaluate(self):
        """The plain cross-entropy over the data, in evaluation mode."""
        self.model.eval()
        with torch.no_grad(), self.method.judged():
            losses = [cross_entropy(outputs(self.model, b)[0], b).item() for b in self.data]
        return sum(losses) / len(losses)

    def weights(self):
        """Those that are judged."""
        with self.method.judged():
            return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def save(self):
        file = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "method": self.method.state_dict(),
            "random": torch.get_rng_state(),
            "step": self.step,
            "hidden": self.hidden,
        }
        torch.save(state, file)
        return file.getvalue()

    def load(self, saved):
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.method.load_state_dict(state["method"])
        torch.set_rng_state(state["random"])
        self.step, self.hidden = state["step"], state["hidden"]
