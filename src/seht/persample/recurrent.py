"""Recurrent layers as the linear maps and gates they are made of, time step by time step.

The fused kernels hide their weights. Here each of them is used by ``F.linear``, whose per-sample
rule knows the rest; the arithmetic and the random numbers are those of PyTorch's own CPU path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.operators.axes import Axis, axis_from
from seht.operators.rules import Mode, Rule, composed, untaped
from seht.persample.tags import Tags

Cell = Callable[[Tensor, Any, Tensor, Tensor | None], Any]
"""(input's part of the gates, state, W_hh, b_hh) -> state."""


def _lstm(gates: Tensor, state: Any, w: Tensor, b: Tensor | None) -> Any:
    h, c = state
    i, f, g, o = (gates + F.linear(h, w, b)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(gates: Tensor, state: Any, w: Tensor, b: Tensor | None) -> Any:
    (h,) = state
    r, z, n = gates.chunk(3, -1)
    hr, hz, hn = F.linear(h, w, b).chunk(3, -1)
    r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
    n = torch.tanh(n + r * hn)
    return (n + z * (h - n),)


def _simple(activation: Any) -> Cell:
    def cell(gates: Tensor, state: Any, w: Tensor, b: Tensor | None) -> Any:
        return (activation(gates + F.linear(state[0], w, b)),)

    return cell


def _layer(
    cell: Cell, x: Tensor, sizes: list[int] | None, state: Any, weights: list[Any], back: bool
) -> tuple[Tensor, Any]:
    """One layer in one direction; with ``sizes`` the input is packed."""
    w_ih, w_hh, b_ih, b_hh = weights[:4]
    gates = F.linear(x, w_ih, b_ih)
    steps = list(gates.unbind(0) if sizes is None else gates.split(sizes))
    counts = [x.shape[1]] * len(steps) if sizes is None else sizes
    if back:
        steps, counts = steps[::-1], counts[::-1]
    alive, first = counts[0], state
    if sizes is not None:
        state = tuple(s[:alive] for s in first)
    outputs: list[Tensor] = []
    ended: list[Any] = []
    for step, size in zip(steps, counts, strict=True):
        if size < alive:  # the shortest sequences have ended
            ended.append(tuple(s[size:] for s in state))
            state = tuple(s[:size] for s in state)
        elif size > alive:  # backwards they begin
            state = tuple(torch.cat([s, f[alive:size]]) for s, f in zip(state, first, strict=True))
        alive = size
        state = cell(step, state, w_hh, b_hh)
        outputs.append(state[0])
    if ended:
        state = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
    outputs = outputs[::-1] if back else outputs
    return torch.stack(outputs) if sizes is None else torch.cat(outputs), state


def _stack(
    cell: Cell, x: Tensor, sizes: list[int] | None, hidden: Any, flat: Any, biases: bool,
    layers: int, dropout: float, train: bool, both: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """All layers; the final states are stacked as PyTorch does."""
    ways, per = 2 if both else 1, 4 if biases else 2
    finals: list[Any] = []
    for layer in range(layers):
        sides = []
        for way in range(ways):
            place = layer * ways + way
            own = list(flat[place * per : (place + 1) * per])
            weights = own if biases else [*own, None, None]
            state = tuple(h[place] for h in hidden)
            y, final = _layer(cell, x, sizes, state, weights, back=way == 1)
            sides.append(y)
            finals.append(final)
        x = torch.cat(sides, -1) if both else sides[0]
        if dropout > 0 and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    return x, [torch.stack(parts) for parts in zip(*finals, strict=True)]


def _network(cell: Cell, *, pair: bool = False) -> Rule:
    """torch.lstm and its kin: (input, hx, flat_weights, bias, layers, dropout, train, both,
    batch_first), or packed (data, batch_sizes, hx, flat_weights, bias, ..., both).
    """

    def run(mode: Mode, func: Any, args: Any, kwargs: Any) -> Any:
        packed = isinstance(args[3], (tuple, list))
        x, sizes, hidden, *rest, first = (*args, False) if packed else (args[0], None, *args[1:])
        if pair and hidden[0].shape[-1] != hidden[1].shape[-1]:
            return func(*args, **kwargs)  # projections (proj_size), a fifth weight: PyTorch's own
        hidden = tuple(hidden) if pair else (hidden,)
        if mode.tracker is not None:
            _tag_hidden(cast(Tags, mode.tracker), x, sizes, hidden, 0 if first else 1)
        with mode.inside():
            x = x.transpose(0, 1) if first else x
            steps = None if sizes is None else sizes.tolist()
            y, finals = _stack(cell, x, steps, hidden, *rest)
            return (y.transpose(0, 1) if first else y, *finals)

    return untaped(run)


def _tag_hidden(tags: Tags, x: Tensor, sizes: Any, hidden: tuple[Tensor, ...], batch: int) -> None:
    """A first state of zeros belongs to the examples as the input does."""
    axis = tags.get(x)
    if not isinstance(axis, Axis) or (sizes is None and axis.dim != batch):
        return
    own = axis.at(1)
    if sizes is not None:
        own = axis_from(1, axis.owners(len(x), tags.n)[: int(sizes[0])], tags.n)
    for state in hidden:
        if tags.get(state) is None and not state.requires_grad:
            tags.tag(state, own)


def _cell(cell: Cell, *, pair: bool = False) -> Rule:
    """torch.lstm_cell and its kin: (input, hx, w_ih, w_hh, b_ih, b_hh)."""

    def build(
        x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        state = cell(F.linear(x, w_ih, b_ih), tuple(hx) if pair else (hx,), w_hh, b_hh)
        return state if pair else state[0]

    return composed(build)


_V = torch._C._VariableFunctions

RULES: dict[Any, Rule] = {
    _V.lstm: _network(_lstm, pair=True),
    _V.gru: _network(_gru),
    _V.rnn_tanh: _network(_simple(torch.tanh)),
    _V.rnn_relu: _network(_simple(torch.relu)),
    _V.lstm_cell: _cell(_lstm, pair=True),
    _V.gru_cell: _cell(_gru),
    _V.rnn_tanh_cell: _cell(_simple(torch.tanh)),
    _V.rnn_relu_cell: _cell(_simple(torch.relu)),
}
