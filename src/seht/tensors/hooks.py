"""Backward hooks of the user's: they belong to the loss's own backward pass, and fire in it once.

A hook on a module or on a tensor inside the network may change the gradient, clip it or keep it.
Our passes send other things through the network than the gradient of the loss (differences with a
factor of millions, second derivatives), so that a hook must not meet them: where there is one, the
penalty is taken from a pass of its own, in which no hook is registered. Hooks on parameters see the
whole gradient, once (:func:`seht.tensors.graph.quiet`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from seht.tensors.process import BACKWARD_HOOKS, GLOBAL_HOOKS

REGISTER = frozenset(
    {
        torch.Tensor.register_hook,
        torch.Tensor.retain_grad,
        torch.Tensor.register_post_accumulate_grad_hook,
    }
)
"""Methods that a closure may call on a tensor to see its gradient."""


_FRAMEWORKS = ("torch.distributed.", "torch.utils.", "lightning.fabric.", "lightning_fabric.")


def heard_anyway(args: tuple[Any, ...]) -> bool:
    """Whether a call of :data:`REGISTER` is not the user's: the hook belongs to PyTorch (FSDP
    gathers weights in one) or a framework, changes nothing, and is wanted in every pass.
    """
    hook = args[1] if len(args) > 1 else None
    made_by = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return made_by.startswith(_FRAMEWORKS)


def unheard(*_: Any, **__: Any) -> RemovableHandle:
    """Replaces :data:`REGISTER` where hooks must not run."""
    return RemovableHandle(OrderedDict())


def hooks_of(modules: Iterable[nn.Module]) -> list[dict[Any, Any]]:
    """The backward hooks of these modules, and those of all modules, as far as there are any."""
    found: list[dict[Any, Any]] = [
        hooks
        for module in modules
        for hooks in (module._backward_hooks, module._backward_pre_hooks)
        if hooks
    ]
    return found + [hooks for hooks in GLOBAL_HOOKS if hooks]


def _nothing(*_: Any) -> None:
    """A hook that is there and does nothing."""


def muted(hooks: list[dict[Any, Any]]) -> AbstractContextManager[None]:
    """These hooks do nothing in graphs that are made in the block.

    They are replaced, not removed: a module with hooks runs a few operations more.
    """
    return _muted(hooks) if hooks else nullcontext()


@contextmanager
def _muted(hooks: list[dict[Any, Any]]) -> Iterator[None]:
    own = [part for part in hooks if all(part is not table for table in GLOBAL_HOOKS)]
    saved = [dict(part) for part in own]
    everywhere = len(own) < len(hooks)
    with BACKWARD_HOOKS.on(lambda: _mute(GLOBAL_HOOKS)) if everywhere else nullcontext():
        _mute(own)
        try:
            yield
        finally:
            for part, kept in zip(own, saved, strict=True):
                part.update(kept)


def _mute(hooks: list[dict[Any, Any]]) -> None:
    for part in hooks:
        part.update(dict.fromkeys(part, _nothing))
