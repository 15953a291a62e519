"""The rule for functions that draw random numbers: a mask is a decision of the centre's, too.

They run again in every pass, from the same random state, and draw the same numbers as long as
what they are given lies in memory as it did: random numbers are drawn in the order of memory. Where
it does not (behind compiled code, say), it is laid out anew first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seht.operators.arithmetic import additive, elementwise
from seht.operators.constants import CONSTANT
from seht.operators.operator import Operator, jointly
from seht.operators.pieces import LINEAR
from seht.operators.rules import Mode, Rule, opened, refused
from seht.tensors.memory import laid_out, layout_of


def _record(mode: Mode, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    layout = layout_of(args), layout_of(tuple(kwargs.values()))
    return func(*args, **kwargs), layout


def _replay(mode: Mode, layout: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return func(*args, **kwargs)
    own = laid_out(args, layout[0])
    named = laid_out(tuple(kwargs.values()), layout[1])
    out = func(*own, **dict(zip(kwargs, named, strict=True)))
    if isinstance(out, Tensor) and own and out is own[0] and out is not args[0]:
        return args[0].copy_(out)  # it was to overwrite its argument
    return out


DRAWN = Rule(_record, _replay, always=True)
"""It applies to constants, too: the mask of a dropout written by hand is one."""

OPERATORS = (
    Operator("""
        dropout dropout_ dropout1d dropout2d dropout3d feature_dropout
    """, DRAWN, additive, jointly),
    Operator("alpha_dropout feature_alpha_dropout rand_like randn_like", DRAWN, elementwise),
    Operator("""
        alpha_dropout_ feature_dropout_ feature_alpha_dropout_ native_dropout randint_like uniform_
        normal_ exponential_ geometric_ cauchy_ log_normal_ random_ binomial
    """, DRAWN),
    Operator("bernoulli bernoulli_ normal poisson", LINEAR, random=True),
    Operator("multinomial", CONSTANT, random=True),
    Operator("gumbel_softmax", opened(F.gumbel_softmax)),
    Operator("_standard_gamma _sample_dirichlet", refused("has kinks")),
)  # fmt: skip
