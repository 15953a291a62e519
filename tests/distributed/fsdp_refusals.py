"""What a sharded model does not have: one clear line, and the model as it was."""

import torch
import torch.distributed as dist
from fsdp_problems import assert_same, batch, check, half, loss_of, make, parts, raised, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import seht
from seht import measure


def refused(model, action, *words, kind=RuntimeError):
    before = parts(model)
    message = raised(kind, action)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    assert_same(before, parts(model))


@check
def forms():
    """Each other form names the way out, also where a warm-up would hide it for an epoch."""
    model = sharded(make("relu", torch.float64))
    data = half(batch("relu", torch.float64, 0))

    def closure():
        return loss_of(model, data)

    def penalty(**options):
        return seht.HessianTrace(model, weight=1e-2, warmup=3, **options)

    lean = "penalty.backward(closure)"
    refused(model, lambda: penalty()(closure), lean)
    refused(model, lambda: penalty(engine="autograd").backward(closure), lean)
    refused(model, lambda: penalty(engine="autograd")(closure), lean)
    refused(model, lambda: penalty(estimator="seht-s").backward(closure), "seht-h")
    refused(model, lambda: penalty().backward(closure, on=closure), "leave it out")
    copy = "unsharded copy"
    refused(model, lambda: seht.hessian_trace(model, closure), copy)
    refused(model, lambda: seht.loss_and_trace(model, closure), copy)
    refused(model, lambda: seht.exact_trace(model, closure), copy)
    refused(model, lambda: seht.check(model, loss_of, data), copy)
    refused(model, lambda: measure.trace(model, loss_of, [data]), copy)
    penalty().backward(closure)


@check
def hooks():
    """FSDP gathers weights in hooks of its own; the user's would need a graph that is kept."""
    model = sharded(make("relu", torch.float64))
    data = half(batch("relu", torch.float64, 0))
    penalties = [seht.HessianTrace(model, weight=1e-2, curvature=c) for c in ("hessian", "ggn")]

    def listening():
        x, y = data
        z = seht.boundary(model(x))
        z.register_hook(lambda g: None)
        return torch.nn.functional.cross_entropy(z, y)

    for penalty in penalties:
        words = ("remove backward hooks", "fully_shard")
        refused(model, lambda: penalty.backward(listening), *words)
        handle = model[0].register_full_backward_hook(lambda m, into, out: None)
        refused(model, lambda: penalty.backward(lambda: loss_of(model, data)), *words)
        handle.remove()
        penalty.backward(lambda: loss_of(model, data))


@check
def policies():
    """Low precision inside FSDP is refused when the penalty is made."""
    for options in (
        {"param_dtype": torch.bfloat16},
        {"reduce_dtype": torch.bfloat16},
        {"output_dtype": torch.float16},
        {"param_dtype": torch.float16, "reduce_dtype": torch.float32},
    ):
        policy = MixedPrecisionPolicy(**options)
        model = sharded(make("relu", torch.float32), mp_policy=policy)
        name = next(iter(options))
        refused(
            model, lambda: seht.HessianTrace(model, weight=1e-2), "MixedPrecisionPolicy", name,
            kind=TypeError,
        )  # fmt: skip
    model = sharded(make("relu", torch.float64), mp_policy=MixedPrecisionPolicy(torch.float32))
    refused(model, lambda: seht.HessianTrace(model, weight=1e-2), "float64", kind=TypeError)
    same = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    model = sharded(make("relu", torch.float32), mp_policy=same)
    data = half(batch("relu", torch.float32, 0))
    seht.HessianTrace(model, weight=1e-2).backward(lambda: loss_of(model, data))
    # Pure bfloat16 weights: the engine's own error.
    model = sharded(make("relu", torch.bfloat16))
    data = half(batch("relu", torch.bfloat16, 0))
    penalty = seht.HessianTrace(model, weight=1e-2)
    refused(
        model, lambda: penalty.backward(lambda: loss_of(model, data)), "float32", kind=TypeError
    )


@check
def other_parallelism():
    """FSDP1 and tensor parallelism, alone and under `fully_shard`."""
    for original in (True, False):
        model = FullyShardedDataParallel(make("relu", torch.float32), use_orig_params=original,
                                         device_id=torch.device("cpu"))  # fmt: skip
        message = raised(RuntimeError, lambda: seht.HessianTrace(model, weight=1e-2))
        assert "fully_shard" in message and "penalty.backward" in message

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make("relu", torch.float32)

    outer = Whole()
    outer.inner[0] = FullyShardedDataParallel(outer.inner[0], device_id=torch.device("cpu"))
    assert "'inner.0'" in raised(RuntimeError, lambda: seht.HessianTrace(outer, weight=1e-2))

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    for both in (False, True):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        if both:
            fully_shard(model, mesh=mesh["dp"])
        message = raised(RuntimeError, lambda: seht.HessianTrace(model, weight=1e-2))
        assert "tensor parallelism" in message and "fully_shard alone" in message


@check
def strangers():
    """A second sharded model beside the penalty's own; a part of a model; outputs too early."""
    model, other = sharded(make("relu", torch.float64)), sharded(make("smooth", torch.float64))
    data = half(batch("relu", torch.float64, 0))
    penalty = seht.HessianTrace(model, weight=1e-2)
    refused(
        model, lambda: penalty.backward(lambda: loss_of(model, data) + loss_of(other, data)),
        "holds both",
    )  # fmt: skip
    part = seht.HessianTrace(model[2], weight=1e-2)
    refused(model, lambda: part.backward(lambda: loss_of(model, data)), "holds both")
    penalty.backward(lambda: loss_of(model, data))

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = make("smooth", torch.float64), nn.Linear(3, 3).double()

        def forward(self, x):
            return self.head(self.body(x))

    model = sharded(Both())
    penalty = seht.HessianTrace(model, weight=1e-2, curvature="ggn", boundary="body")
    refused(model, lambda: penalty.backward(lambda: loss_of(model, data)), "boundary=")
    penalty = seht.HessianTrace(model, weight=1e-2, curvature="ggn", boundary="head")
    penalty.backward(lambda: loss_of(model, data))
