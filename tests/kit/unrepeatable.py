"""Closures that compute something else each time they run, and the word the error should have.

Each builder takes ``(model, x, y)`` and returns the closure; the model is a ReLU network with
modules 0 (linear), 2 (ReLU) and 4 (linear).
"""

import itertools
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

BUILDERS = {}


def says(words):
    def keep(builder):
        BUILDERS[builder.__name__] = (builder, words)
        return builder

    return keep


def loss(z, y):
    return F.cross_entropy(z, y)


# --- states in outer variables ----------------------------------------------------------------


@says("add read another tensor")
def hidden_state(model, x, y):
    state = {"h": torch.zeros_like(x)}

    def closure():
        z = model(x + state["h"])
        state["h"] = state["h"] + x.sin()
        return loss(z, y)

    return closure


@says("add read another tensor")
def detached_hidden_state(model, x, y):
    state = {"h": torch.zeros(len(x), 3, dtype=x.dtype)}

    def closure():
        z = model(x) + state["h"]
        state["h"] = z.detach() + 1
        return loss(z, y)

    return closure


@says("add read another tensor")
def hidden_state_with_its_graph(model, x, y):
    state = {"h": torch.zeros(len(x), 3, dtype=x.dtype)}

    def closure():
        state["h"] = model(x) + state["h"]
        return loss(state["h"], y)

    return closure


@says("add read another tensor")
def hidden_state_after_no_grad(model, x, y):
    inner = hidden_state(model, x, y)

    def closure():
        with torch.no_grad():
            x.std()
        return inner()

    return closure


@says("stack was given something else")
def growing_list(model, x, y):
    losses = []

    def closure():
        losses.append(loss(model(x), y))
        return torch.stack(losses).mean()

    return closure


@says("add read another tensor")
def outer_tensor_written_after_it_is_read(model, x, y):
    h = torch.zeros(4, dtype=x.dtype)

    def closure():
        z = model(x + h)
        h.add_(1)
        return loss(z, y)

    return closure


@says("read another tensor")
def outer_tensor_written_before_it_is_read(model, x, y):
    h = torch.zeros(4, dtype=x.dtype)

    def closure():
        h[0] += 1
        return loss(model(x + h), y)

    return closure


@says("add read another tensor")
def outer_tensor_written_through_data(model, x, y):
    h = torch.zeros(4, dtype=x.dtype)

    def closure():
        h.data.add_(1)
        return loss(model(x + h), y)

    return closure


@says("add read another tensor")
def outer_tensor_written_by_numpy(model, x, y):
    array = np.zeros(4)
    h = torch.from_numpy(array)

    def closure():
        array[:] += 1
        return loss(model(x + h), y)

    return closure


@says("mul read another tensor")
def order_of_a_dictionary(model, x, y):
    scales = {"a": torch.ones(3).double(), "b": 2 * torch.ones(3).double()}

    def closure():
        key = next(iter(scales))
        scales[key] = scales.pop(key)
        z = model(x)
        for scale in scales.values():
            z = (z * scale).tanh()
        return loss(z, y)

    return closure


@says("linear")
def weight_that_is_computed_once(model, x, y):
    """The other runs find the one of the first."""
    cache = {}

    def closure():
        if not cache:
            cache["w"] = model[0].weight.tanh()
        return loss(model[4](F.linear(x, cache["w"]).relu()), y)

    return closure


# --- other data -----------------------------------------------------------------------------------


@says("another tensor")
def next_of_an_iterator(model, x, y):
    batches = itertools.cycle(zip(x.split(8), y.split(8), strict=True))

    def closure():
        a, b = next(batches)
        return loss(model(a), b)

    return closure


@says("__getitem__ was given another argument")
def another_slice(model, x, y):
    count = itertools.count()

    def closure():
        i = 8 * (next(count) % 4)
        return loss(model(x[i : i + 8]), y[i : i + 8])

    return closure


@says("__getitem__ was given")
def another_length(model, x, y):
    count = itertools.count(8)

    def closure():
        n = next(count)
        return loss(model(x[:n]), y[:n])

    return closure


@says("__getitem__ was given another argument")
def indices_from_numpy(model, x, y):
    own = np.random.default_rng(1)

    def closure():
        chosen = own.permutation(len(x))[:8]
        return loss(model(x[chosen]), y[chosen])

    return closure


@says("tensor was given another argument")
def images_that_begin_with_zeros(model, x, y):
    """Only a look at the whole array tells them apart."""
    own = np.random.default_rng(1)

    def closure():
        image = np.zeros((8, 4))
        image[-1] = own.random(4)
        return loss(model(torch.tensor(image)), y[:8])

    return closure


@says("tensor was given another argument")
def labels_from_a_list(model, x, y):
    own = random.Random(1)
    return lambda: loss(model(x), torch.tensor(own.sample(y.tolist(), len(y))))


@says("linear read another tensor")
def another_module(model, x, y):
    heads = itertools.cycle([nn.Linear(3, 3).double(), nn.Linear(3, 3).double()])
    return lambda: loss(next(heads)(model(x)), y)


@says("matmul.* read another tensor")
def sparse_matrix_that_is_written(model, x, y):
    graph = torch.eye(len(x)).double().to_sparse_csr()

    def closure():
        graph.values().data.mul_(1.1)
        return loss(graph @ model(x), y)

    return closure


# --- other numbers --------------------------------------------------------------------------------


@says("mul was given another argument")
def own_python_random(model, x, y):
    own = random.Random(1)
    return lambda: loss(model(x * own.random()), y)


@says("add read another tensor")
def own_numpy_random(model, x, y):
    own = np.random.default_rng(1)
    return lambda: loss(model(x + torch.from_numpy(own.standard_normal(x.shape))), y)


@says("mul was given another argument")
def own_numpy_number(model, x, y):
    own = np.random.default_rng(1)
    return lambda: loss(model(x) * np.float32(own.random()), y)


@says("mul was given another argument")
def the_time(model, x, y):
    return lambda: loss(model(x), y) * (1 + time.perf_counter() % 1)


@says("where it had called")
def a_counter_in_an_if(model, x, y):
    count = itertools.count()

    def closure():
        z = model(x)
        return loss(z * 2 if next(count) % 2 else z, y)

    return closure


@says("dropout was given another argument")
def train_and_eval_in_turn(model, x, y):
    count, dropout = itertools.count(), nn.Dropout(0.5)

    def closure():
        dropout.train(next(count) % 2 == 0)
        return loss(dropout(model(x)), y)

    return closure


@says("other random numbers")
def another_seed(model, x, y):
    count = itertools.count()

    def closure():
        torch.manual_seed(next(count))
        return loss(F.dropout(model(x)), y)

    return closure


@says("random generator of its own")
def a_generator_with_another_seed(model, x, y):
    count = itertools.count()

    def closure():
        generator = torch.Generator().manual_seed(next(count))
        return loss(model(x + torch.randn(x.shape, generator=generator)), y)

    return closure
