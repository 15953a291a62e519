"""The table of kinks: which function is frozen by which rule.

Keyed by function objects, because ``F.relu``, ``torch.relu`` and ``Tensor.relu`` reach a function
mode as different objects and a look-up must not do string work (``torch.compile`` traces it).
Everything along the step that is not twice smooth is here, and everything autograd holds constant.
What is not here is smooth: gelu, silu, mish, tanh, sigmoid, softplus, softmax, cross_entropy.
"""

from __future__ import annotations

import math
import types
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from seht.operators import foreach, formulas, losses
from seht.operators.composed import composed, opened, refused
from seht.operators.constants import (
    ALIAS,
    ASSIGNED,
    BACKWARD,
    CAST,
    CONSTANT,
    DETACHED,
    GRADIENT,
    HOOKED,
    PADDED,
)
from seht.operators.pieces import LINEAR, RELU, sided
from seht.operators.places import REDUCED, indexed, pooled
from seht.operators.random_draws import DRAWN
from seht.operators.rules import Rule, depends
from seht.operators.scales import EVENED
from seht.operators.vector_norms import dist, norm, pairwise_distance
from seht.tensors.hooks import REGISTER


def spellings(names: str) -> list[Any]:
    """Every function object behind these names: in F, torch, torch._C._nn, Tensor and aten."""
    homes = (F, torch, torch._C._nn, torch.Tensor, torch.special, torch.linalg)
    words = names.split()
    found = [getattr(home, n) for n in words for home in homes if callable(getattr(home, n, None))]
    for packet in (getattr(torch.ops.aten, n, None) for n in words if not n.startswith("__")):
        # What an exported model is made of.
        if packet is not None:
            found += [packet, *(getattr(packet, overload) for overload in packet.overloads())]
    return list(dict.fromkeys(found))


_DISPATCHED = frozenset(f for f in vars(F).values() if isinstance(f, types.FunctionType))
_max_pools: dict[Any, Rule] = {}
for _n in (1, 2, 3):
    for _kind, _options in (("max_pool", 6), ("adaptive_max_pool", 2), ("fractional_max_pool", 4)):
        _indexed_form = getattr(F, f"{_kind}{_n}d_with_indices", None)
        if _indexed_form is not None:
            _one = pooled(_indexed_form, _n, options=_options)
            _pair = pooled(_indexed_form, _n, options=_options, pair=True)
            for _f in spellings(f"{_kind}{_n}d"):  # only max_pool has a form without the indices
                _single = _f in _DISPATCHED or _kind == "max_pool"
                _max_pools[_f] = _one if _single else _pair
            for _f in spellings(f"{_kind}{_n}d_with_indices"):
                _max_pools[_f] = _pair


def _bag_kink(
    input: Any, weight: Any, offsets: Any = None, max_norm: Any = None, norm_type: Any = 2.0,
    scale_grad_by_freq: Any = False, mode: str = "mean", *_: Any, **__: Any,
) -> bool:  # fmt: skip
    return mode == "max" or max_norm is not None


def _extreme(*args: Any, reduce: Any = None, **_: Any) -> bool:
    found = [a for a in (*args, reduce) if isinstance(a, str)]
    return not found or found[0] in ("amax", "amin", "max", "min")


def _rounded(*_: Any, rounding_mode: Any = None, **__: Any) -> bool:
    return rounding_mode is not None


KINKS: dict[Any, Rule] = {
    **dict.fromkeys(spellings("relu relu_"), RELU),
    **dict.fromkeys(
        spellings("""
            relu6 leaky_relu leaky_relu_ hardtanh hardtanh_ hardsigmoid abs abs_
            hardsigmoid_ threshold _threshold threshold_ rrelu rrelu_ absolute hardshrink
            softshrink clamp clamp_ clip clip_ clamp_min clamp_min_ clamp_max clamp_max_
            maximum minimum fmax fmin fix trunc trunc_ round round_ floor floor_ ceil
            ceil_ frac sign sgn nan_to_num __abs__ relu6_ absolute_ sign_ fix_ frac_ angle
            sgn_ nan_to_num_ bernoulli bernoulli_ normal poisson gt_ ge_ lt_ le_ eq_ ne_
            greater_ greater_equal_ less_ less_equal_ not_equal_
        """),
        LINEAR,
    ),
    # smooth on each side
    **dict.fromkeys(spellings("elu elu_"), sided(formulas.elu, formulas.elu_sides)),
    **dict.fromkeys(spellings("selu selu_"), sided(formulas.selu, formulas.selu_sides)),
    **dict.fromkeys(spellings("prelu"), sided(formulas.prelu)),
    **dict.fromkeys(spellings("celu"), composed(formulas.celu)),
    **dict.fromkeys(spellings("celu_"), composed(partial(formulas.celu, inplace=True))),
    **dict.fromkeys(spellings("hardswish"), composed(formulas.hardswish)),
    **dict.fromkeys(spellings("hardswish_"), composed(partial(formulas.hardswish, inplace=True))),
    F.softsign: composed(formulas.softsign),
    **dict.fromkeys(spellings("softplus"), composed(formulas.softplus, formulas.bends)),
    # the place of a maximum
    **_max_pools,
    **dict.fromkeys(spellings("max min median nanmedian"), indexed(1, default=None)),
    **dict.fromkeys(spellings("sort mode cummax cummin"), indexed(1)),
    **dict.fromkeys(spellings("topk kthvalue"), indexed(2)),
    **dict.fromkeys(spellings("amax amin"), REDUCED),
    # what autograd holds constant
    **dict.fromkeys(
        spellings("""
            gt ge lt le eq ne greater greater_equal less less_equal not_equal __gt__
            __ge__ __lt__ __le__ __eq__ __ne__ equal allclose isclose isnan isinf isfinite
            isposinf isneginf signbit is_nonzero logical_not logical_and logical_or
            logical_xor argmax argmin argsort nonzero argwhere count_nonzero unique
            unique_consecutive searchsorted bucketize histc bincount floor_divide
            multinomial all any detach_copy item tolist __bool__ __float__ __int__ __index__
            long int short bool char byte __contains__ numpy __array__ tensor new_tensor
        """),
        CONSTANT,
    ),
    **dict.fromkeys(spellings("detach"), ALIAS),
    torch.Tensor.data.__get__: ALIAS,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: ASSIGNED,  # type: ignore[attr-defined]
    **dict.fromkeys(spellings("to type type_as _to_copy"), CAST),
    **dict.fromkeys(spellings("detach_"), DETACHED),
    torch.autograd.grad: GRADIENT,
    torch.Tensor.backward: BACKWARD,
    **dict.fromkeys(REGISTER, HOOKED),
    # losses and functions made of the above
    **dict.fromkeys(
        spellings("""
            l1_loss smooth_l1_loss huber_loss hinge_embedding_loss margin_ranking_loss
            multi_margin_loss multilabel_margin_loss triplet_margin_loss cosine_embedding_loss
        """),
        refused("has kinks, which are frozen where it is called as torch.nn.functional's"),
    ),
    F.l1_loss: composed(losses.l1),
    F.smooth_l1_loss: composed(losses.smooth_l1),
    F.huber_loss: composed(losses.huber),
    F.hinge_embedding_loss: composed(losses.hinge_embedding),
    F.margin_ranking_loss: composed(losses.margin_ranking),
    F.multi_margin_loss: composed(losses.multi_margin),
    F.multilabel_margin_loss: composed(losses.multilabel_margin),
    F.triplet_margin_loss: composed(losses.triplet_margin),
    F.cosine_embedding_loss: composed(losses.cosine_embedding),
    F.gaussian_nll_loss: composed(losses.gaussian_nll),
    **{
        f: opened(f)
        for f in (
            F.gumbel_softmax,
            F.normalize,
            F.lp_pool1d,
            F.lp_pool2d,
            F.lp_pool3d,
            F.triplet_margin_with_distance_loss,
        )
    },
    **dict.fromkeys(spellings("norm vector_norm"), norm("vector")),
    torch.linalg.norm: norm("either"),
    torch.linalg.matrix_norm: norm("matrix"),
    **dict.fromkeys(spellings("dist"), composed(dist)),
    **dict.fromkeys(spellings("pairwise_distance"), composed(pairwise_distance)),
    **dict.fromkeys(
        spellings("cdist"),
        composed(losses.cdist, lambda a, b, p=2.0, *_, **__: not 2 <= p < math.inf),
    ),
    **dict.fromkeys(
        spellings("pdist"), composed(losses.pdist, lambda x, p=2.0, **_: not 2 <= p < math.inf)
    ),
    # of lists of tensors
    **{f: composed(build) for n, build in foreach.FORMS.items() for f in spellings(n)},
    # kinks without a rule
    **dict.fromkeys(
        spellings("""
            aminmax msort copysign copysign_ fmod fmod_ remainder remainder_ quantile
            nanquantile rnn_relu rnn_relu_cell
            renorm renorm_ heaviside __mod__ __rmod__ frexp i0e i1e fake_quantize_per_tensor_affine
            fake_quantize_per_channel_affine _fake_quantize_learnable_per_tensor_affine
            _fake_quantize_learnable_per_channel_affine fused_moving_avg_obs_fake_quant
            _standard_gamma _sample_dirichlet
        """),
        refused("has kinks"),
    ),
    **dict.fromkeys(
        spellings("scatter_reduce scatter_reduce_ index_reduce index_reduce_ segment_reduce"),
        refused("with a maximum or minimum has kinks", _extreme),
    ),
    **dict.fromkeys(
        spellings("div div_ divide divide_"), refused("with rounding_mode has kinks", _rounded)
    ),
    **dict.fromkeys(
        spellings("grid_sample grid_sampler grid_sampler_2d grid_sampler_3d"),
        refused("has kinks in its grid", lambda _, grid, *__, **___: depends((grid,), {})),
    ),
    **dict.fromkeys(
        spellings("logit logit_"),
        refused("with eps has kinks", lambda x, eps=None, **_: eps is not None),
    ),
    **dict.fromkeys(spellings("matrix_exp linalg_matrix_exp"), EVENED),
    F.embedding: PADDED,
    # random numbers
    **dict.fromkeys(
        spellings("""
            dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_
            feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_
            native_dropout rand_like randn_like randint_like uniform_ normal_ exponential_
            geometric_ cauchy_ log_normal_ random_ binomial lstm gru rnn_tanh
            scaled_dot_product_attention multi_head_attention_forward
        """),
        DRAWN,
    ),
    F.embedding_bag: refused("with mode='max' or max_norm has kinks", _bag_kink),
}

DETACH = frozenset([*spellings("detach to"), torch.Tensor.data.__get__])  # type: ignore[attr-defined]
"""Functions that only take a tensor out of the graph, or cast it."""

RANDOM = frozenset(
    spellings(
        "multinomial bernoulli bernoulli_ normal poisson rrelu rrelu_ "
        "fractional_max_pool2d fractional_max_pool2d_with_indices "
        "fractional_max_pool3d fractional_max_pool3d_with_indices"
    )
)
"""Functions with a rule that consume random numbers, which a replay must skip."""


_OPERATORS = frozenset(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__
    __ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__
    """.split()  # noqa: SIM905
)

IN_PLACE = frozenset(
    getattr(home, n)
    for home in (torch, torch.Tensor)
    for n in dir(home)
    if (n.endswith("_") and not n.endswith("__")) or n in _OPERATORS
    if callable(getattr(home, n))
)
"""Functions that write into their first argument."""
