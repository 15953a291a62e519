"""Started by torchrun: Accelerate and Fabric on two ranks, half of the training a warm-up."""

import os
import sys
from pathlib import Path

import runs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from lightning_fabric import Fabric

import seht
from seht.integrations import training

EPOCHS = 4


def train(name, model, optimizer, loader, backward):
    penalty = seht.HessianTrace(model, weight=1e-2, warmup=0.5, accumulate=2, seed=0)
    with training(penalty, loader, epochs=EPOCHS, optimizer=optimizer):
        for _ in range(EPOCHS):
            for place, (x, y) in enumerate(loader):
                backward(penalty(lambda: F.cross_entropy(model(x), y)) / 2)
                if place % 2:
                    optimizer.step()
                    optimizer.zero_grad()
    assert penalty.schedule.plain_steps == 3 and penalty.last.trace is not None
    return f"{name} {penalty.step} of {penalty.schedule.total_steps}"


def main(out):
    torch.set_num_threads(1)
    said, weights = [], []
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = runs.network()
    prepared = accelerator.prepare(model, runs.optimizer_of(model), runs.loader())
    said.append(train("accelerate", *prepared, accelerator.backward))
    weights.append(prepared[0])
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = runs.network()
    model, optimizer = fabric.setup(model, runs.optimizer_of(model))
    loader = fabric.setup_dataloaders(runs.loader())
    said.append(train("fabric", model, optimizer, loader, fabric.backward))
    weights.append(model)
    sums = [repr(sum(float(p.double().sum()) for p in m.parameters())) for m in weights]
    Path(f"{out}.{dist.get_rank()}").write_text("\n".join([*said, *sums]))


if __name__ == "__main__":
    main(sys.argv[1])
    dist.barrier()
    os._exit(0)
