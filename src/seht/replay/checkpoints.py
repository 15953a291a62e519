"""Activation checkpoints: a recomputation must repeat the decisions of the first run.

A checkpoint keeps the inputs of its part of the network and runs it anew when the backward pass
needs it. Outside our modes it would then take its own decisions (at weights that have moved: a
gradient that is wrong by orders of magnitude), enter the user's autocast, use the operators that
are wrong at the third order, and move BatchNorm statistics once more. So every checkpoint that is
made inside a pass remembers the mode it was made in, and runs again under that mode, set back to
where the checkpoint began.

The reentrant kind cannot be differentiated by ``torch.autograd.grad``; inside our passes it is
answered by the other kind, which gives the same gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint as place
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from seht.tensors.process import CHECKPOINTS
from seht.tensors.undo import uninterrupted


def _mode() -> Any:
    """The innermost of our modes that is on, or None."""
    for mode in reversed(_get_current_function_mode_stack()):
        if hasattr(mode, "recomputing"):
            return mode
    return None


def _frame(recompute_fn: Callable[..., None], *rest: Any, **named: Any) -> Any:
    mode = _mode()
    if mode is not None:
        recompute_fn = _again(recompute_fn, mode.recomputing())
    return _real("_CheckpointFrame")(recompute_fn, *rest, **named)


def _again(
    recompute_fn: Callable[..., None], surroundings: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., None]:
    def recompute(*args: Any) -> None:
        # It may run in the user's own backward pass, where nothing else holds back a Ctrl-C.
        with uninterrupted(), checkpoints(), surroundings():
            recompute_fn(*args)

    return recompute


def _hooks(name: str) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        hooks = _real(name)(*args)
        if _mode() is not None:
            pack = hooks.pack_hook

            @functools.wraps(pack)
            def unseen(tensor: Tensor) -> Any:
                with torch._C.DisableTorchFunction():  # how a tensor is kept is no decision
                    return pack(tensor)

            hooks.pack_hook = unseen
        return hooks

    return make


class _NotReentrant:
    """Replaces ``CheckpointFunction``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if _mode() is None:
            return _real("CheckpointFunction").apply(function, preserve, *args)
        if not any(isinstance(a, Tensor) and a.requires_grad for a in args):
            place.check_backward_validity(args)  # warns: nothing inside gets a gradient
            with torch.no_grad():
                return function(*args)
        return place.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


def _real(name: str) -> Any:
    return CHECKPOINTS.before[name]


checkpoints = functools.partial(
    CHECKPOINTS.replaced,
    _CheckpointFrame=_frame,
    _checkpoint_hook=_hooks("_checkpoint_hook"),
    _recomputation_hook=_hooks("_recomputation_hook"),
    CheckpointFunction=_NotReentrant,
)
"""Checkpoints that are made in the block, inside a mode of ours, run again under that mode."""
