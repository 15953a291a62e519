"""Closures that repeat themselves although they look as if they might not.

Each builder takes ``(model, x, y)`` and returns the closure; the model is a ReLU network with
modules 0 (linear), 2 (ReLU) and 4 (linear). They run in float64, in both engines.
"""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

import seht

BUILDERS = {}


def keep(builder):
    BUILDERS[builder.__name__] = builder
    return builder


def loss(z, y):
    return F.cross_entropy(z, y)


# --- states that the model keeps --------------------------------------------------------------


@keep
def batch_norm(model, x, y):
    model.append(nn.BatchNorm1d(3).double())
    return lambda: loss(model(x), y)


@keep
def batch_norm_with_a_cumulative_average(model, x, y):
    model.append(nn.BatchNorm1d(3, momentum=None).double())
    return lambda: loss(model(x), y)


@keep
def moving_average(model, x, y):
    model.register_buffer("average", torch.ones(3).double())

    def closure():
        z = model(x)
        with torch.no_grad():
            model.average.mul_(0.9).add_(z.mean(0), alpha=0.1)
        return loss(z / (1 + model.average.abs()), y)

    return closure


@keep
def moving_average_that_is_assigned(model, x, y):
    model.register_buffer("average", torch.ones(3).double())

    def closure():
        z = model(x)
        model.average = 0.9 * model.average + 0.1 * z.detach().mean(0)
        return loss(z / (1 + model.average.abs()), y)

    return closure


@keep
def moving_average_in_a_plain_tensor(model, x, y):
    average = torch.ones(3).double()

    def closure():
        z = model(x)
        with torch.no_grad():
            average.mul_(0.9).add_(z.mean(0), alpha=0.1)
        return loss(z / (1 + average.abs()), y)

    return closure


@keep
def moving_average_by_foreach(model, x, y):
    model.register_buffer("average", torch.ones(3).double())

    def closure():
        z = model(x)
        with torch.no_grad():
            torch._foreach_mul_([model.average], 0.9)
            torch._foreach_add_([model.average], [0.1 * z.mean(0)])
        return loss(z / (1 + model.average.abs()), y)

    return closure


@keep
def spectral_norm(model, x, y):
    model.append(parametrizations.spectral_norm(nn.Linear(3, 3).double()))
    return lambda: loss(model(x), y)


@keep
def recurrent_network(model, x, y):
    model.gru = nn.GRU(3, 3).double()

    def closure():
        h = model[4](model[2](model[0](x))).view(-1, 8, 3)
        return loss(model.gru(h)[0].flatten(0, 1), y)

    return closure


# --- data -----------------------------------------------------------------------------------------


@keep
def from_numpy(model, x, y):
    array = x.numpy()
    return lambda: loss(model(torch.from_numpy(array)), y)


@keep
def from_numpy_with_nan(model, x, y):
    array = x.numpy().copy()
    array[0, 0] = np.nan

    def closure():
        t = torch.from_numpy(array)
        return loss(model(t.masked_fill(t.isnan(), 0)), y)

    return closure


@keep
def from_a_list(model, x, y):
    labels = y.tolist()
    return lambda: loss(model(x), torch.tensor(labels))


@keep
def workspace_that_is_filled_each_time(model, x, y):
    work = torch.empty_like(x)

    def closure():
        work.copy_(x).mul_(2)
        return loss(model(work.clone()), y)

    return closure


def sparse(layout):
    """A constant sparse matrix, as a graph network has it."""

    def builder(model, x, y):
        graph = torch.eye(len(x)).double().roll(1, 0) + torch.eye(len(x)).double()
        graph = graph.to_sparse(layout=layout, **BLOCKS.get(layout, {}))
        return lambda: loss(model(graph @ x), y)

    return builder


BLOCKS = {torch.sparse_bsr: {"blocksize": (2, 2)}}
for _layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr):
    BUILDERS[str(_layout).removeprefix("torch.")] = sparse(_layout)


@keep
def views_of_views(model, x, y):
    def closure():
        a = x.view(4, 8, 4).permute(1, 0, 2).reshape(-1, 4)
        return loss(model(a).unflatten(0, (8, 4)).transpose(0, 1).flatten(0, 1), y)

    return closure


@keep
def functional_calls(model, x, y):
    def closure():
        weights = {name: p * 1.0 for name, p in model.named_parameters()}
        return loss(functional_call(model, weights, (x,)), y)

    return closure


# --- random numbers -------------------------------------------------------------------------------


@keep
def dropout(model, x, y):
    return lambda: loss(F.dropout(model(x), 0.3), y)


@keep
def train_and_eval_within_one_run(model, x, y):
    drop = nn.Dropout(0.3)
    return lambda: loss(drop.train()(model(x)) + drop.eval()(model(x)), y)


@keep
def generator(model, x, y):
    own = torch.Generator().manual_seed(3)

    def closure():
        with torch.no_grad():
            noise = torch.randn(x.shape, generator=own, dtype=x.dtype)
        return loss(model(x + noise) + torch.rand(3, generator=own, dtype=x.dtype), y)

    return closure


@keep
def generator_that_is_made_each_time(model, x, y):
    def closure():
        own = torch.Generator().manual_seed(5)
        return loss(model(x + torch.randn(x.shape, generator=own, dtype=x.dtype)), y)

    return closure


@keep
def the_same_seed_each_time(model, x, y):
    def closure():
        torch.manual_seed(7)
        return loss(F.dropout(model(x)), y)

    return closure


@keep
def mixup(model, x, y):
    def closure():
        share = torch.distributions.Beta(0.5, 0.5).sample().item()
        return loss(model(share * x + (1 - share) * x[torch.randperm(len(x))]), y)

    return closure


@keep
def layer_drop(model, x, y):
    """A layer is left out now and then, as Python's random numbers say."""

    def closure():
        h = model[0](x)
        for _ in range(6):
            if random.random() < 0.5:
                h = model[2](h) + h.sin()
        return loss(seht.boundary(model[4](h)), y)

    return closure


@keep
def shuffled_in_python(model, x, y):
    def closure():
        rows = list(range(len(x)))
        random.shuffle(rows)
        return loss(model(x[rows] * random.gauss(1, 0.1)), y)

    return closure


@keep
def numpy_random(model, x, y):
    return lambda: loss(model(x + torch.from_numpy(np.random.rand(*x.shape))), y)


@keep
def numpy_normal_numbers_one_by_one(model, x, y):
    """They are drawn in pairs, of which the second waits."""
    return lambda: loss(model(x) * np.random.randn(), y)


@keep
def mixup_by_numpy(model, x, y):
    def closure():
        share = np.random.beta(0.5, 0.5)
        return loss(model(share * x + (1 - share) * x[np.random.permutation(len(x))]), y)

    return closure


# --- metrics --------------------------------------------------------------------------------------


@keep
def counters_in_place(model, x, y):
    total, count = torch.zeros(()), torch.zeros((), dtype=torch.long)

    def closure():
        z = model(x)
        value = loss(z, y)
        total.add_(value.detach())
        count.add_(1)
        str((total / count).item())
        return value

    return closure


@keep
def running_total_as_a_new_tensor(model, x, y):
    state = {"total": torch.zeros(())}

    def closure():
        value = loss(model(x), y)
        state["total"] = state["total"] + value.detach()
        return value

    return closure


@keep
def list_of_predictions(model, x, y):
    seen = []

    def closure():
        z = model(x)
        seen.append(z.argmax(1))
        return loss(z, y)

    return closure


@keep
def metrics_in_the_first_run_only(model, x, y):
    right = torch.zeros(())

    def closure():
        h = model[2](model[0](x))
        if not seht.replaying():
            str(h.detach().std().item())
        z = model[4](h * h.detach().abs().amax())
        if not seht.replaying():
            with torch.no_grad():
                right.add_((z.softmax(1).max(1)[1] == y).double().mean())
                str(model(x).mean())
        return loss(z, y)

    return closure
