"""Which weights are probed, and the random directions they are probed along.

Every direction is a pure function of ``(seed, probe, tensor)``: it can be redrawn instead of
stored, and it does not depend on the engine, on the dtype of the weights or on wrappers around
the model. Signs are int8, a quarter of a float32 copy of the weights.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from seht.errors import nearest
from seht.tensors.memory import refuse_shared

ParamSpec = str | Iterable[str] | Callable[[str, Tensor], bool] | None

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_WRAPPERS |= {"_forward_module", "_original_module"}  # Fabric's
_MASK64 = (1 << 64) - 1
_LAYER_BITS = 48
"""The low 48 bits of a seed choose the layers, all 64 the entries (see :func:`call_seed`)."""


@dataclass(frozen=True)
class Chosen:
    """The probed tensors of a model, by name, and which of them the user asked for by name."""

    tensors: dict[str, Tensor]
    named: frozenset[str]


@cache
def clean_name(name: str) -> str:
    """A parameter's name without what DDP, ``torch.compile`` and other wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def choose(model: nn.Module, params: ParamSpec = None) -> Chosen:
    """Choose the tensors that are probed.

    By default these are the trainable tensors of two or more dimensions: the paper looks at "the
    weight parameters in each layer" and leaves out biases (section 4.1). ``params`` may be a name
    or glob pattern, several of them, or a predicate ``(name, tensor) -> bool``. A tied tensor
    counts once, under its first name.
    """
    trainable: dict[str, Tensor] = {}
    frozen: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    everything = list(model.named_parameters(remove_duplicate=False))
    owners: defaultdict[str, set[int]] = defaultdict(set)
    for raw, tensor in everything:
        owners[clean_name(raw)].add(id(tensor))
    for raw, tensor in everything:
        name = clean_name(raw)
        if len(owners[name]) > 1:
            name = raw  # a part of the model is really called "module"
        aliases[name] = first.setdefault(id(tensor), name)
        if aliases[name] == name:
            (trainable if tensor.requires_grad else frozen)[name] = tensor

    named: set[str] = set()
    if params is None:
        tensors = {n: t for n, t in trainable.items() if t.dim() >= 2}
    elif callable(params):
        tensors = {n: t for n, t in trainable.items() if params(n, t)}
    else:
        wanted: set[str] = set()
        for pattern in [params] if isinstance(params, str) else list(params):
            wanted |= _match(pattern, aliases, trainable, named)
        tensors = {n: t for n, t in trainable.items() if n in wanted}
    if not tensors:
        raise ValueError(_nothing_chosen(params, trainable, frozen))
    _check_tensors(tensors)
    refuse_shared(model, tensors, everything)
    return Chosen(tensors, frozenset(named))


def quantised(model: nn.Module) -> list[str]:
    """The weights that are integers, as in a quantised base model."""
    weights = [(n, w) for n, w in model.named_parameters() if w.dim() > 1]
    return [n for n, w in weights if not (w.is_floating_point() or w.is_complex())]


def _match(
    pattern: object, aliases: dict[str, str], trainable: dict[str, Tensor], named: set[str]
) -> set[str]:
    if not isinstance(pattern, str):
        raise TypeError(
            f"params must hold names or glob patterns, not {type(pattern).__name__}; "
            "pass a predicate (name, tensor) -> bool to choose by other means"
        )
    wanted = clean_name(pattern)
    if wanted in aliases:
        hits = {aliases[wanted]}
        named |= hits
    else:
        hits = {aliases[n] for n in aliases if fnmatch.fnmatchcase(n, wanted)}
    if not hits:
        raise ValueError(
            f"params: no parameter of the model matches {pattern!r}{nearest(wanted, aliases)} "
            "(model.named_parameters() lists the names)"
        )
    if not hits & trainable.keys():
        raise ValueError(
            f"params: {pattern!r} is frozen (requires_grad is False); unfreeze it or leave it out"
        )
    return hits


def _nothing_chosen(
    params: ParamSpec, trainable: dict[str, Tensor], frozen: dict[str, Tensor]
) -> str:
    if not trainable and not frozen:
        return "the model has no parameters, so there is no Hessian to take the trace of"
    if not trainable and not any(tensor.is_floating_point() for tensor in frozen.values()):
        return "no parameter of the model is floating, so there is no Hessian to take the trace of"
    if not trainable:
        return "every parameter of the model is frozen; set requires_grad_(True) on those to probe"
    if params is None:
        return (
            "no trainable parameter has two or more dimensions; "
            'name those to probe with params=, for example params="*"'
        )
    return "params chooses no trainable parameter; model.named_parameters() lists the names"


def _check_tensors(tensors: dict[str, Tensor]) -> None:
    devices = {t.device for t in tensors.values()}
    if len(devices) > 1:
        raise ValueError(
            f"the chosen parameters lie on several devices ({', '.join(map(str, devices))}); "
            "move the model to one, or choose the parameters of one device with params="
        )
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise TypeError(
                f"parameter {name!r} is {tensor.dtype}, and only real floating ones are probed; "
                "leave it out with params=, or keep its real and imaginary parts as parameters"
            )


# --- seeds ------------------------------------------------------------------------------------


def check_seed(seed: object) -> int:
    """The seed itself, or the one torch was seeded with (which is read, not consumed)."""
    if seed is None:
        return torch.initial_seed()
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number or None, not {seed!r}")
    return seed


def mix(*values: int) -> int:
    """One well-mixed 64-bit integer from several (splitmix64, chained)."""
    state = 0
    for value in values:
        state = (state ^ (value & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state


def call_seed(base: int, step: int, call: int = 0) -> int:
    """The seed of one call: calls of one step share the bits that choose the layers."""
    shared = mix(base, step) & (1 << _LAYER_BITS) - 1
    return (call % (1 << 15)) << _LAYER_BITS | shared


def layer_seed(seed: int) -> int:
    """The part of a seed that chooses the layers."""
    return mix(seed & (1 << _LAYER_BITS) - 1, 1)


def entry_seed(seed: int, probe: int, tensor: int) -> int:
    """The seed of one tensor's entries in one probe."""
    return mix(seed, 2, probe, tensor)


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of our own, so that the global random state is never consumed."""
    return torch.Generator(device=device).manual_seed(seed & (1 << 63) - 1)


# --- directions -------------------------------------------------------------------------------


def rademacher(shape: torch.Size, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Entries +1 or -1, each with probability 1/2, as int8: 64 of them from one random word."""
    count = shape.numel()
    words = torch.empty((count + 63) // 64, dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=generator(seed, device))
    eights = _sign_table(str(device)).index_select(0, words.view(torch.uint8).int())
    return eights.view(torch.int8)[:count].view(shape)


@cache
def _sign_table(device: str) -> Tensor:
    # Row b holds the eight signs that the bits of byte b stand for, packed into one int64.
    bytes_, bits = torch.arange(256, device="cpu").unsqueeze(1), torch.arange(8, device="cpu")
    signs = ((bytes_ >> bits & 1) * 2 - 1).to(torch.int8)
    return signs.view(torch.int64).squeeze(1).to(device)


def sparse_signs(
    shape: torch.Size, prob: float, seed: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The paper's Q(p): +1 and -1 with probability p each, 0 with probability 1 - 2p, as int8."""
    draw = torch.empty(shape, dtype=torch.int32, device=device)
    draw.random_(generator=generator(seed, device))  # uniform on 0 .. 2^31 - 1
    edge = round(prob * 2**31)
    return (draw < edge).to(torch.int8) - (draw >= 2**31 - edge).to(torch.int8)


def gaussian(shape: torch.Size, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard normal entries in float32."""
    return torch.randn(shape, generator=generator(seed, device), device=device)
