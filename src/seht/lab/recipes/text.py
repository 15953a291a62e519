"""Language models that need no download."""

from __future__ import annotations

from seht.lab.config import DataConfig, ModelConfig, OptimConfig, Recipe


def pydocs() -> Recipe:
    """A small LSTM on Python's own documentation: a language model that needs no download."""
    return Recipe(
        name="pydocs",
        data=DataConfig("pydocs", bptt=35, vocabulary=2000),
        model=ModelConfig("lstm", embedding=64, hidden=64, layers=2, dropout=0.2),
        optim=OptimConfig(
            lr=20.0, momentum=0.0, weight_decay=0.0, schedule="plateau", gamma=0.25, clip=0.25
        ),
        batch=20,
        epochs=6,
        eval_batch=10,
    )
