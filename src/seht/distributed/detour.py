"""A detour past ``DistributedDataParallel``: all passes run the inner module, one is reduced.

At the end of every forward pass DDP prepares its reducer for the backward pass that must follow.
With our perturbed passes that happens too often: with ``find_unused_parameters`` it fails, with
``static_graph=True`` it silently reduces what is not a gradient yet. So during a call every
``DistributedDataParallel.forward`` in this thread, also that of a wrapper that the closure
captured, takes a detour: DDP's work before the forward pass is done once, the passes call the inner
module, and DDP's work after it is done once, with the penalised loss in place of the model's
outputs. The backward pass that follows is then the one that the reducer expects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from seht.distributed.ranks import PenaltyCall, grouped
from seht.replay.mode import _leave_alone
from seht.replay.replayer import in_extra_run
from seht.task import Closure, split
from seht.tensors.gradients import Reached
from seht.tensors.graph import leaves_of, walk
from seht.tensors.process import DDP_FORWARD, DETOUR

_PLAIN, _PENALISED, _LOCAL = range(3)
_COLLECTIVE = ("torch.distributed.nn", "torch.distributed._functional_collectives")
"""Where PyTorch keeps the collectives that have a gradient."""


def active() -> DistributedDataParallel | None:
    """The wrapper whose forward pass we are inside of: a training step that is itself wrapped."""
    return DistributedDataParallel._active_ddp_module if grouped() else None


class Detour(PenaltyCall):
    """One call of the penalty in a process group: which wrappers ran, and what they still need."""

    def __init__(
        self,
        known: Sequence[DistributedDataParallel] = (),
        *,
        lean: bool = False,
        kind: int = _PLAIN,
        meet: Callable[[list[DistributedDataParallel]], None] | None = None,
    ) -> None:
        self._known = list(known)
        """Wrappers of the model's weights, whether the closure calls them or not."""
        self._lean = lean
        self._kind = kind
        self._meet = meet
        """Called with the wrappers that the closure used."""
        self.called: list[DistributedDataParallel] = []
        self._synced: set[int] = set()
        self._outputs: list[Any] = []
        self._own = 0
        """Collectives that DDP itself started inside the closure."""

    @classmethod
    def local(cls) -> Detour:
        """Every pass stays on this rank, and no reducer is involved."""
        return cls(kind=_LOCAL)

    def __enter__(self) -> Detour:
        self._around = DDP_FORWARD.replaced(forward=_detoured)
        self._around.__enter__()
        self._token = DETOUR.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        DETOUR.reset(self._token)
        self._around.__exit__(None, None, None)

    def penalise(self) -> None:
        """From here on the closure runs several times.

        Rank 0's buffers are sent around first, as they would be at the beginning of the forward
        pass, so that every pass starts from them.
        """
        self._kind = _PENALISED
        inside = active()
        for ddp in self._known:
            if ddp is inside:  # it has done that itself
                continue
            if ddp._check_sync_bufs_pre_fwd() and not joins(ddp):
                ddp._sync_buffers()
                self._synced.add(id(ddp))

    def forward(self, ddp: DistributedDataParallel, inputs: Any, kwargs: Any) -> Any:
        """The replacement of ``ddp.forward``."""
        first = not in_extra_run() and not any(ddp is known for known in self.called)
        if first:
            self.called.append(ddp)
        if self._kind == _PLAIN:
            return DDP_FORWARD.before["forward"](ddp, *inputs, **kwargs)
        _refuse_settings(ddp)
        if self._kind == _PENALISED and first:
            inputs, kwargs = self._before(ddp, inputs, kwargs)
        elif ddp.device_ids:
            inputs, kwargs = _moved(ddp, inputs, kwargs)
        output = ddp._run_ddp_forward(*inputs, **kwargs)
        if ddp.find_unused_parameters and not self._lean and not in_extra_run():
            self._outputs.append(output)
        return output

    def _before(self, ddp: DistributedDataParallel, inputs: Any, kwargs: Any) -> Any:
        needed, started = ddp.require_forward_param_sync, collectives()
        if id(ddp) in self._synced:
            ddp.require_forward_param_sync = False
        try:
            with torch._C.DisableTorchFunction():  # nothing of this is a decision of the model
                return ddp._pre_forward(*inputs, **kwargs)
        finally:
            ddp.require_forward_param_sync = needed
            self._own += collectives() - started

    def checked(self, closure: Closure) -> Closure:
        """The closure, with a check of its communication between ranks."""

        def run() -> Any:
            before = collectives() - self._own
            output = closure()
            if in_extra_run() and collectives() - self._own != before and self._in_use():
                raise RuntimeError(
                    "the closure communicates between ranks (a gathered batch, a summed loss), and "
                    "on a penalised step each rank is at weights of its own: compute the loss from "
                    "this rank's examples, DDP averages the gradients; ask seht.replaying() before "
                    "a metric is summed over ranks"
                )
            if not in_extra_run() and self._in_use():
                _refuse_graph(split(output)[0])
            return output

        return run

    def _in_use(self) -> bool:
        return bool(self._known or self.called or active())

    def finish(self, result: Any) -> Any:
        """Prepare the reducers for the backward pass of ``result``, in place of the outputs."""
        wrappers = list(self.called) if self._kind == _PENALISED else []
        for ddp in self._passed_by(result):
            _refuse_settings(ddp)
            ddp._pre_forward(None)
            wrappers.append(ddp)
        # With their own graph the reducer would go through it once more, and where the centre's
        # backward pass is ours (``deferred.py``) it is gone by then.
        tensors = [t for t in _find_tensors(self._outputs) if t.requires_grad]
        leaves = leaves_of(tensors)
        outputs = Reached.apply(*leaves) if leaves else None
        for ddp in wrappers:
            result, outputs = ddp._post_forward((result, outputs))
        if self._meet is not None:
            self._meet(self.called)
        return result

    def _passed_by(self, result: Any) -> list[DistributedDataParallel]:
        """Known wrappers that the closure never called although their weights are in the loss."""
        loss, inside = result[0] if isinstance(result, tuple) else result, active()
        told = _weights([*self.called, *([] if inside is None else [inside])])
        rest = [ddp for ddp in self._known if not told & _weights([ddp])]
        if not rest or not isinstance(loss, Tensor) or not loss.requires_grad:
            return []
        leaves = {id(leaf) for leaf in leaves_of([loss])}
        found = [ddp for ddp in rest if leaves & _weights([ddp])]
        if len(_weights(found)) < sum(len(_weights([ddp])) for ddp in found):
            raise RuntimeError(
                "several DistributedDataParallel wrappers hold the model, and the closure calls "
                "none of them, so that it is not clear which one averages the gradients; call the "
                "wrapper in the closure"
            )
        return found


def _weights(wrappers: Iterable[DistributedDataParallel]) -> set[int]:
    return {id(p) for ddp in wrappers for p in ddp._module_parameters}


def _detoured(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    detour: Detour | None = DETOUR.get()
    if detour is None:  # another thread's
        return DDP_FORWARD.before["forward"](self, *inputs, **kwargs)
    return detour.forward(self, inputs, kwargs)


def told(ddp: DistributedDataParallel, loss: Any) -> Any:
    """The loss, ready to be differentiated *inside* the wrapper's forward pass.

    The reducer is prepared for that now. At the end of the forward pass the wrapper would prepare
    it again, for a backward pass that never comes, so that is skipped once. If the pass fails
    before its end, the next one starts afresh.
    """
    own, kind = vars(ddp), type(ddp)

    def over(output: Any) -> Any:
        del own["_pre_forward"], own["_post_forward"]
        return output

    def anew(*inputs: Any, **kwargs: Any) -> Any:
        over(None)
        return kind._pre_forward(ddp, *inputs, **kwargs)

    result = kind._post_forward(ddp, loss)
    own["_pre_forward"], own["_post_forward"] = anew, over
    return result


def joins(ddp: DistributedDataParallel) -> bool:
    """Whether ranks may run out of batches (``with ddp.join():``), and miss what we send."""
    return bool(ddp._join_config.enable)


def collectives() -> int:
    """How many collectives this process has started, in every group."""
    groups: Iterable[Any] = dist.distributed_c10d._world.pg_map if grouped() else ()
    return sum(group._get_sequence_number_for_group() for group in groups)


def _moved(ddp: DistributedDataParallel, inputs: Any, kwargs: Any) -> Any:
    """The inputs on the wrapper's device, where it would put them itself."""
    from torch.distributed.utils import _to_kwargs

    assert ddp.device_ids
    device = torch.device(ddp.device_type, ddp.device_ids[0])
    moved = _to_kwargs(inputs, kwargs, device, ddp.use_side_stream_for_tensor_copies)
    return (moved[0][0], moved[1][0]) if moved[0] else ((), {})


def _refuse_settings(ddp: DistributedDataParallel) -> None:
    if getattr(ddp, "mixed_precision", None) is not None:
        raise RuntimeError(
            "DistributedDataParallel(mixed_precision=...) computes with low-precision copies of "
            "the weights, which a small step does not move; leave it out and use torch.autocast"
        )


def _refuse_graph(loss: Any) -> None:
    """Refuse a loss whose nested gradients would start what only its backward pass should."""
    for node in walk([loss.grad_fn] if isinstance(loss, Tensor) else []):
        made_by = getattr(node, "_forward_cls", type(node))
        if made_by.__name__ == "_DDPSink":
            ddp = node.ddp_weakref()
            if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
                raise RuntimeError(
                    "outputs of a DistributedDataParallel(static_graph=True) that was called "
                    "before the closure reach the loss, and the gradients taken inside a penalised "
                    "step would set off its reduction; call the wrapper inside the closure"
                )
        elif made_by.__module__.startswith(_COLLECTIVE):
            raise RuntimeError(
                f"the loss depends on other ranks ({made_by.__name__}), and on a penalised step "
                "each rank is at weights of its own; compute it from this rank's examples, DDP "
                "averages the gradients"
            )


# ``torch.compile(ddp)`` meets these in place of DDP's own, which the compiler knows to pass over.
for _function in (
    Detour._before, in_extra_run, collectives, _moved, _refuse_settings,
):  # fmt: skip
    _leave_alone(_function)
_leave_alone(_detoured, calls=False)  # these two call the model
_leave_alone(Detour.forward, calls=False)
