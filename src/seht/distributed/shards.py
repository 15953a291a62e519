"""A model sharded by ``fully_shard`` (FSDP2), seen from the engine: what it keeps where.

Every rank holds a part of each weight, a ``DTensor``; the whole is gathered before a module runs,
freed after it, and gathered *again* in the backward pass. So the shards are what is moved along a
probe, they stay moved until the backward pass is over, and gathered copies are thrown away after
each write to a shard. Gradients go through FSDP's own reduction and arrive on the shards.

FSDP has no public way from a gathered weight to its shard, nor one to set ``.grad`` of both aside;
this file is the only one that looks inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seht.tensors.graph import quiet
from seht.tensors.memory import is_dtensor

_HIDDEN = ("unshard", "wait_for_unshard", "reshard")


class Shards:
    """The sharded modules of a model, and everything the passes have to do with them."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = modules
        self.states = _unique(m._get_fsdp_state() for m in modules)
        self.groups = [group for state in self.states for group in _groups(state)]
        self.params = [param for group in self.groups for param in group.fsdp_params]
        for group in self.groups:
            _refuse_low_precision(group)
        for param in self.params:
            if param.is_dtensor:  # sharded once more, on top of tensor parallelism
                raise parallel(param._module_info.param_name)
        meshes = _unique(param.sharded_param.device_mesh for param in self.params)
        if any(mesh != meshes[0] for mesh in meshes):
            raise RuntimeError(
                "the modules of the model are sharded over different device meshes; give every "
                "fully_shard the same mesh="
            )
        if not meshes:
            raise RuntimeError(
                "fully_shard found no weights to shard; apply it to modules that have some"
            )
        self.mesh = meshes[0]

    # --- between the ranks --------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """Sums over the ranks of what each of them has."""
        total = values.detach().to(self.mesh.device_type, torch.float64, copy=True)
        for dim in range(self.mesh.ndim):
            dist.all_reduce(total, group=self.mesh.get_group(dim))
        return total.to(values.device)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the ranks, as FSDP takes it of gradients."""
        factors = {getattr(group, "gradient_divide_factor", None) for group in self.groups}
        factor = factors.pop() if len(factors) == 1 else None
        return self.sum(values) / (factor or self.mesh.size())

    def share(self, tensor: Any) -> float:
        """The weight of this rank's part of a tensor in a sum over all ranks."""
        if not is_dtensor(tensor):
            return 1 / self.mesh.size()
        sizes = [self.mesh.size(d) for d, p in enumerate(tensor.placements) if p.is_replicate()]
        return 1 / torch.Size(sizes).numel()

    # --- weights ------------------------------------------------------------------------------

    @cached_property
    def gathered(self) -> dict[int, Tensor]:
        """By identity of the gathered weight, which the graph knows: its shard."""
        made = [p for p in self.params if hasattr(p, "_unsharded_param")]
        return {id(p._unsharded_param): p.sharded_param for p in made}

    def reshard(self) -> None:
        """Free gathered copies, so that the next use gathers the present shards."""
        for module in self.modules:
            module.reshard()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Keep FSDP's own operations from the mode that records the closure's.

        Its gathering runs under ``no_grad`` and would be replayed as a constant.
        """
        places = [(group, name) for group in self.groups for name in _HIDDEN]
        places += [(state, "_lazy_init") for state in self.states]
        with ExitStack() as after:
            for owner, name in places:
                setattr(owner, name, _unseen(getattr(owner, name)))
                after.callback(delattr, owner, name)
            yield

    # --- gradients ----------------------------------------------------------------------------

    @contextmanager
    def collecting(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """While the block runs, gradients are reduced into an empty ``.grad``.

        Afterwards everything is as it was: what was accumulated on the shards and, without
        gradient synchronisation, on the gathered weights; the users' settings and hooks.
        """
        changes: list[tuple[Any, str, Any]] = [(leaf, "grad", None) for leaf in leaves]
        for param in self.params:
            changes.append((param, "unsharded_accumulated_grad", None))
            if hasattr(param, "_unsharded_param"):
                changes.append((param._unsharded_param, "grad", None))
        for group in self.groups:
            changes += [(group, "reduce_grads", True), (group, "all_reduce_grads", True)]
        contexts = _unique(state._state_ctx for state in self.states)
        changes += [(context, "is_last_backward", True) for context in contexts]
        with quiet(leaves), ExitStack() as after:
            for leaf in leaves:  # no hooks that run after `.grad` was written: an optimiser's step
                hooks = getattr(leaf, "_post_accumulate_grad_hooks", None)
                if hooks:
                    after.callback(hooks.update, dict(hooks))
                    hooks.clear()
            for owner, name, value in changes:
                after.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            yield

    def refuse_partial(self) -> None:
        """Half-reduced gradients of earlier calls can be neither kept apart nor finished."""
        if any(getattr(group, "_partial_reduce_output", None) is not None for group in self.groups):
            raise RuntimeError(
                "gradients of an earlier call wait for their all-reduce; accumulate with "
                "set_requires_gradient_sync(False) in place of set_requires_all_reduce(False)"
            )

    def reduce_waiting(self) -> None:
        """Reduce what plain calls left on the gathered weights, if this call synchronises.

        A backward pass of FSDP's would do so; ours had these gradients set aside.
        """
        roots = []
        for state in self.states:
            params = [
                p for group in _groups(state) if group.reduce_grads for p in group.fsdp_params
            ]
            if any(map(_waits, params)):
                roots += [state._state_ctx.all_states[0]]
        for root in _unique(roots):
            root._root_post_backward_final_callback()

    # --- failures -----------------------------------------------------------------------------

    @contextmanager
    def cleaned(self) -> Iterator[None]:
        """If the block fails, FSDP forgets that a pass was under way."""
        try:
            yield
        except BaseException:
            self.clean()
            raise

    def clean(self) -> None:
        """Back to what FSDP looks like between two steps, on this rank."""
        with torch._C.DisableTorchFunction():
            for state in self.states:
                if state._is_root and hasattr(state, "_reset_iter_state"):
                    state._reset_iter_state()
                elif not hasattr(state, "_reset_iter_state"):  # older versions of torch
                    _reset(state)
        self.reshard()


def _reset(state: Any) -> None:
    """What ``reset_iter_state`` does, for versions of torch that lack it."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    idle = type(state._training_state).IDLE
    for part in (state, *_groups(state)):
        part._training_state = idle
    for group in _groups(state):
        result, group._all_gather_result = group._all_gather_result, None
        if result is not None and isinstance(result.all_gather_work, dist.Work):
            result.all_gather_work.wait()
        group._post_forward_indices.clear()
        group._to_sharded()
    context, comm = state._state_ctx, state._comm_ctx
    context.iter_forward_root, context.post_backward_final_callback_queued = None, False
    if state._is_root is not None:
        comm.all_gather_state = None
        comm.post_forward_order.clear()


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older versions of torch have one, or none
        groups = [g for g in (state._fsdp_param_group,) if g is not None]
    return list(groups)


def _waits(param: Any) -> bool:
    gathered = getattr(param, "_unsharded_param", None)
    waiting = gathered is not None and gathered.grad is not None
    return waiting or param.unsharded_accumulated_grad is not None


def _unique(items: Iterable[Any]) -> list[Any]:
    """In order, each object once."""
    return list({id(item): item for item in items}.values())


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def _refuse_low_precision(group: Any) -> None:
    policy = group.mp_policy
    for kind in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, kind)
        for param in group.fsdp_params if dtype is not None else ():
            own = param.sharded_param.dtype
            if torch.finfo(dtype).eps > torch.finfo(own).eps:
                raise TypeError(
                    f"fully_shard's MixedPrecisionPolicy has {kind}={dtype} for weights in {own}, "
                    "in which differences of gradients are nothing but rounding; leave it out "
                    "(or at the weights' own dtype) where a penalty is used"
                )


def parallel(name: str) -> RuntimeError:
    """The refusal of weights that tensor parallelism has cut."""
    return RuntimeError(
        f"parameter {name!r} is a DTensor of tensor parallelism, which no engine can probe; shard "
        "the model with torch.distributed.fsdp.fully_shard alone"
    )
