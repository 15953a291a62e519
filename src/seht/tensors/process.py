"""Every change that we make to the whole process, in one place, with how it is undone.

Some of what a step needs can only be done for the whole process. What changes for all threads is
declared here as a :class:`Change`, what concerns one thread or task as a context variable; the
docstring of each names the module that uses it and for how long. Besides, PyTorch's own context
managers for one thread are used around passes (``inference_mode``, ``enable_grad``,
``autocast``), and random numbers are rewound by ``random_state.py``.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.utils.checkpoint
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

T = TypeVar("T")


class Change(Generic[T]):
    """A setting of the process that we change while a block runs.

    ``read`` looks at it, ``write`` puts back what was read.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], Any]) -> None:
        self.read, self.write = read, write
        self.before = read()
        """What the first of the blocks that are active now found."""
        self._lock = threading.Lock()
        self._inside: set[object] = set()

    def on(self, make: Callable[[], Any]) -> AbstractContextManager[None]:
        """``make`` it another while the block runs, in all threads.

        The first one in makes the change, the last one out puts back what the first had found: one
        thread must not take the change of another for what the user wanted.
        """
        return _Block(self, make)

    def enter(self, block: object, make: Callable[[], Any]) -> None:
        """A block begins."""
        with self._lock:
            if not self._inside:
                self.before = self.read()
                self._inside.add(block)
                make()
            self._inside.add(block)

    def leave(self, block: object) -> None:
        """A block ends, or could not begin."""
        with self._lock:
            if self._inside == {block}:
                self.write(self.before)
            self._inside.discard(block)


class _Block(AbstractContextManager[None]):
    """A class, because several are entered in every pass, and a generator is slower."""

    def __init__(self, change: Change[Any], make: Callable[[], Any]) -> None:
        self._change, self._make = change, make

    def __enter__(self) -> None:
        try:
            self._change.enter(self, self._make)
        except BaseException:
            self._change.leave(self)
            raise

    def __exit__(self, *_: object) -> None:
        self._change.leave(self)


class Attributes(Change[dict[str, Any]]):
    """Attributes of a module or class. What replaces them must do what they do wherever it is not
    meant: it is called in all threads.
    """

    def __init__(self, owner: Any, *names: str) -> None:
        self._owner = owner
        super().__init__(lambda: {name: getattr(owner, name) for name in names}, self._assign)

    def _assign(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._owner, name, value)

    def replaced(self, **by: Any) -> AbstractContextManager[None]:
        """They are replaced while the block runs."""
        return self.on(partial(self._assign, by))


AUTOCAST = Attributes(torch.autocast, "__enter__")
"""An autocast that the closure enters is switched off at once: compiled code would not ask us.

``precision/policy.py``, while a closure runs.
"""

CHECKPOINTS = Attributes(
    torch.utils.checkpoint,
    *("_CheckpointFrame", "_checkpoint_hook", "_recomputation_hook", "CheckpointFunction"),
)
"""A checkpoint that is made in a pass is computed again as in that pass.

``replay/checkpoints.py``, while a closure runs or is differentiated by us.
"""

DDP_FORWARD = Attributes(DistributedDataParallel, "forward")
"""The passes of a step run the inner module, and the reducer sees one.

``distributed/detour.py``, during a call in a process group.
"""

# Not by `signal`, which looks each time for a constant that has the handler's value, in vain.
INTERRUPT: Change[Any] = Change(
    partial(_signal.getsignal, signal.SIGINT), partial(_signal.signal, signal.SIGINT)
)
"""Ctrl-C waits until everything is back. The main thread only, so that it is simply written.

``undo.py``, during a call.
"""

_FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
_FLAG = "_in_fabric_backward"


def _fabric() -> dict[str, bool]:
    found = {name: getattr(sys.modules.get(name), _FLAG, None) for name in _FABRIC}
    return {name: flag for name, flag in found.items() if flag is not None}


def _set_fabric(flags: dict[str, bool]) -> None:
    for name, flag in flags.items():
        setattr(sys.modules[name], _FLAG, flag)


FABRIC = Change(_fabric, _set_fabric)
"""In mixed precision Fabric refuses every gradient that is not taken by ``fabric.backward(loss)``:
``loss.backward()`` would forget its scaler. The gradients inside a step want no scaler.

:func:`own_gradients`, while we differentiate; what the user does afterwards is watched as before.
"""


def own_gradients() -> AbstractContextManager[None]:
    """Let the gradients of our passes through."""
    if not any(name in sys.modules for name in _FABRIC):
        return nullcontext()
    return FABRIC.on(lambda: _set_fabric(dict.fromkeys(_fabric(), True)))


_COMPILER = "torch._functorch.config"


def _donated() -> bool | None:
    return getattr(sys.modules.get(_COMPILER), "donated_buffer", None)


def _set_donated(value: bool | None) -> None:
    if value is not None:
        setattr(sys.modules[_COMPILER], "donated_buffer", value)  # noqa: B010


DONATED = Change(_donated, _set_donated)
"""Code that is compiled in a pass keeps what its backward pass needs: we take more than one
gradient of a graph, which code for batches of any size would refuse.

:func:`lasting_graphs`, during an estimate.
"""


def lasting_graphs() -> AbstractContextManager[None]:
    """A graph of code that is compiled in the block can be differentiated more than once."""
    if _donated() is None:  # nothing has been compiled
        return nullcontext()
    return DONATED.on(lambda: _set_donated(False))


# --- how float32 products are computed ------------------------------------------------------------

OPERATIONS = [(b, op) for b in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]
_get_new = getattr(torch._C, "_get_fp32_precision_getter", None)
_set_new: Any = getattr(torch._C, "_set_fp32_precision_setter", None)
# The attribute of torch.backends.cudnn refuses after torch.backends.disable_global_flags().
_set_cudnn = torch._C._set_cudnn_allow_tf32

Products = tuple[tuple[str, bool, bool] | None, dict[tuple[str, str], str]]
"""PyTorch has two ways to say it, of which the older raises once the newer was used: precision of
matrix products, TF32 in cuBLAS and in cuDNN, or None; and the newer, by operation, where it is.
"""


def _products() -> Products:
    new = {} if _get_new is None else {place: _get_new(*place) for place in OPERATIONS}
    try:
        matmul = torch.get_float32_matmul_precision()
        cublas, cudnn = torch.backends.cuda.matmul.allow_tf32, torch._C._get_cudnn_allow_tf32()
    except RuntimeError:
        return None, new
    return (matmul, cublas, cudnn), new


def _set_products(found: Products) -> None:
    old, new = found
    if old is not None:
        matmul, cublas, cudnn = old
        torch.set_float32_matmul_precision(matmul)
        if torch.backends.cuda.matmul.allow_tf32 != cublas:
            torch.backends.cuda.matmul.allow_tf32 = cublas
        _set_cudnn(cudnn)
    for place, value in new.items():  # the older way sets several at once
        if _get_new is not None and _get_new(*place) != value:
            _set_new(*place, value)


def _set_exact() -> None:
    if PRODUCTS.before[0] is not None:
        torch.set_float32_matmul_precision("highest")
        _set_cudnn(False)
    else:
        for place in OPERATIONS:
            _set_new(*place, "ieee")


PRODUCTS = Change(_products, _set_products)
"""Products and convolutions of float32 are not shortened to TF32 or bfloat16.

:func:`unshortened`, during an estimate and its backward pass.
"""


def unshortened() -> AbstractContextManager[None]:
    """Products and convolutions of float32 are computed in float32 while the block runs."""
    return PRODUCTS.on(_set_exact)


# --- kernels that have no second derivative -------------------------------------------------------

ATTENTION = Change(_cur_sdpa_kernel_backends, _sdpa_kernel)
"""Attention is computed by the one kernel that has a second derivative.

:func:`math_attention`, while a closure runs for nested gradients.
"""

CUDNN = Change(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled)
"""Recurrent layers are computed by PyTorch's own kernels, not by cuDNN's.

:func:`without_cudnn`, in a call of such a layer for nested gradients.
"""


def math_attention() -> AbstractContextManager[None]:
    """Attention has a second derivative while the block runs."""
    return ATTENTION.on(lambda: _sdpa_kernel([SDPBackend.MATH]))


def without_cudnn() -> AbstractContextManager[None]:
    """Nothing is computed by cuDNN while the block runs."""
    return CUDNN.on(lambda: torch._C._set_cudnn_enabled(False))


# --- the profiler ---------------------------------------------------------------------------------

_KINETO = "KINETO_LOG_LEVEL"


def _set_kineto(level: str | None) -> None:
    os.environ.pop(_KINETO, None)
    if level is not None:
        os.environ[_KINETO] = level


KINETO = Change(lambda: os.environ.get(_KINETO), _set_kineto)
"""PyTorch's profiler prints no line at its start and stop.

``doctor/cost.py``, while memory is measured.
"""


def quiet_profiler() -> AbstractContextManager[None]:
    """Profiles are made without a word while the block runs."""
    return KINETO.on(lambda: _set_kineto("99"))


# --- hooks ----------------------------------------------------------------------------------------

GLOBAL_HOOKS: list[dict[int, Any]] = [
    modules._global_backward_hooks,
    modules._global_backward_pre_hooks,
]


def _set_hooks(tables: list[dict[int, Any]]) -> None:
    for table, values in zip(GLOBAL_HOOKS, tables, strict=True):
        table.update(values)


BACKWARD_HOOKS = Change(lambda: [dict(table) for table in GLOBAL_HOOKS], _set_hooks)
"""The user's own, on all modules, do nothing in passes that are not the loss's own.

``graph.py``, while a perturbed pass runs.
"""

MODULE_CALLS = modules.register_module_forward_pre_hook
"""Modules that the closure calls beside the model are met, and their buffers lent.

``replay/state.py``, while a closure runs; removed by its handle.
"""

OPTIMIZER_STEPS = optimizers.register_optimizer_step_pre_hook
"""A closure that calls an optimiser's step is refused.

``replay/closures.py``, while a closure runs; removed by its handle.
"""


CHANGES: dict[str, Callable[[], Any]] = {
    "torch.autocast.__enter__": AUTOCAST.read,
    "torch.utils.checkpoint": CHECKPOINTS.read,
    "DistributedDataParallel.forward": DDP_FORWARD.read,
    "the handler of Ctrl-C": INTERRUPT.read,
    "Fabric's flag": FABRIC.read,
    "buffers that compiled code gives up": DONATED.read,
    "float32 products": PRODUCTS.read,
    "kernels of attention": ATTENTION.read,
    "cuDNN": CUDNN.read,
    "the profiler's log": KINETO.read,
    "backward hooks on all modules": BACKWARD_HOOKS.read,
    "calls of all modules": lambda: dict(modules._global_forward_pre_hooks),
    "steps of all optimizers": lambda: dict(optimizers._global_optimizer_pre_hooks),
}
"""All of them, with a look at what they are now."""


# --- what a block knows of itself, in this thread or asynchronous task, until it is reset --------

REPLAYING: ContextVar[bool] = ContextVar("seht_replaying", default=False)
"""An extra run of a closure (``replay/replayer.py``)."""

ASKED: ContextVar[int] = ContextVar("seht_asked", default=0)
"""How often closures have asked :func:`seht.replaying`, a count (``replay/replayer.py``)."""

INSIDE: ContextVar[bool] = ContextVar("seht_inside", default=False)
"""A step, in which there can be no other (``replay/closures.py``)."""

STRICT: ContextVar[Any] = ContextVar("seht_strict", default=None)
"""The ``Precision`` that an autocast of the closure meets (``precision/policy.py``)."""

BOUNDARY: ContextVar[Any] = ContextVar("seht_boundary", default=None)
"""The ``Boundary`` that :func:`seht.boundary` marks the outputs for (``curvature/boundary.py``)."""

DETOUR: ContextVar[Any] = ContextVar("seht_detour", default=None)
"""The ``Detour`` that a call takes past DDP (``distributed/detour.py``)."""

VARIABLES: tuple[ContextVar[Any], ...] = (
    REPLAYING, ASKED, INSIDE, STRICT, BOUNDARY, DETOUR,
)  # fmt: skip
