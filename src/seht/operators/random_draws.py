"""The rule for functions that draw random numbers: a mask is a decision of the centre's, too.

They run again in every pass, from the same random state, and draw the same numbers as long as
what they are given lies in memory as it did: random numbers are drawn in the order of memory. Where
it does not (behind compiled code, say), it is laid out anew first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seht.operators.rules import Rule
from seht.tensors.layouts import laid_out, layout_of


def _record(mode: Any, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    layout = layout_of(args), layout_of(tuple(kwargs.values()))
    return func(*args, **kwargs), layout


def _replay(mode: Any, layout: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return func(*args, **kwargs)
    own = laid_out(args, layout[0])
    named = laid_out(tuple(kwargs.values()), layout[1])
    out = func(*own, **dict(zip(kwargs, named, strict=True)))
    if isinstance(out, Tensor) and own and out is own[0] and out is not args[0]:
        return args[0].copy_(out)  # it was to overwrite its argument
    return out


DRAWN = Rule(_record, _replay, always=True)
"""Also of constants: the mask of a dropout written by hand is one."""
