"""The table of axes: which function carries the examples how.

For elementwise functions, reductions and losses (``arithmetic.py``), and for whatever only puts
entries elsewhere (``movement.py``). Any other function is asked by experiment (``experiment.py``):
where the inputs of some examples change, which entries of the output do? If those of other examples
do too, the function couples examples. Answers are kept by shapes and arguments, so that the
experiment is made on the first step only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from seht.operators import IN_PLACE, spellings
from seht.operators.axes.arithmetic import (
    added_product,
    additive,
    all_but_first,
    along_dim,
    batch_normed,
    copied,
    divided,
    divided_by,
    elementwise,
    reduced,
    scaled,
    spatial,
    trailing,
    within,
)
from seht.operators.axes.calls import Follow
from seht.operators.axes.criteria import chosen, classes, entries
from seht.operators.axes.movement import indexed, joined, packed, stacked, unpacked

_VF = torch._C._VariableFunctions

AXES: dict[Any, Follow] = {
    **dict.fromkeys(
        spellings("""
            relu relu_ relu6 relu6_ leaky_relu leaky_relu_ elu elu_ selu selu_ celu celu_ gelu silu
            mish hardswish hardswish_ hardsigmoid hardsigmoid_ hardtanh hardtanh_ softplus
            sigmoid sigmoid_ tanh tanh_ logsigmoid tanhshrink softshrink hardshrink threshold
            threshold_ exp exp_ expm1 log log1p log2 log10 sqrt sqrt_ rsqrt square sin cos tan
            erf erfc abs abs_ sign reciprocal pow pow_ __pow__ __rpow__ clamp clamp_ clip clip_
            clamp_min clamp_max maximum minimum fmax fmin lerp addcdiv alpha_dropout
            feature_alpha_dropout nan_to_num atan2 xlogy logaddexp hypot
            gt ge lt le eq ne __gt__ __ge__ __lt__ __le__ __eq__ __ne__ logical_not logical_and
            logical_or isnan isinf isfinite long int bool round floor ceil trunc
            zeros_like ones_like empty_like full_like rand_like randn_like
            smooth_l1 softsign rrelu
        """),
        elementwise,
    ),
    torch.Tensor.data.__get__: elementwise,  # type: ignore[attr-defined]
    **dict.fromkeys(
        spellings("""
            add add_ sub sub_ subtract rsub neg negative __radd__ __rsub__ __add__ __sub__ __neg__
            __iadd__ __isub__ where masked_fill masked_fill_ dropout dropout_ dropout1d dropout2d
            dropout3d feature_dropout detach clone contiguous float double half bfloat16 to type
            type_as requires_grad_ cpu
        """),
        additive,
    ),
    **dict.fromkeys(spellings("copy_"), copied),
    **dict.fromkeys(spellings("mul mul_ multiply multiply_ __mul__ __rmul__ __imul__"), scaled),
    **dict.fromkeys(spellings("addcmul addcmul_"), added_product),
    **dict.fromkeys(
        spellings("""
            div div_ divide divide_ true_divide true_divide_ __truediv__ __itruediv__ __div__
            __idiv__
        """),
        divided,
    ),
    **dict.fromkeys(spellings("__rdiv__ __rtruediv__"), divided_by),
    **dict.fromkeys(spellings("sum mean nansum"), reduced),
    F.cross_entropy: classes,
    F.nll_loss: chosen,
    **dict.fromkeys(
        (
            F.mse_loss,
            F.binary_cross_entropy,
            F.binary_cross_entropy_with_logits,
            F.kl_div,
            F.poisson_nll_loss,
        ),
        entries,
    ),
    **dict.fromkeys(spellings("__getitem__ index_select"), indexed),
    **dict.fromkeys(spellings("cat concat concatenate"), joined),
    **dict.fromkeys(spellings("stack"), stacked),
    **dict.fromkeys(spellings("batch_norm"), batch_normed),
    **dict.fromkeys(spellings("group_norm"), within(all_but_first)),
    **dict.fromkeys(spellings("layer_norm rms_norm"), within(trailing)),
    **dict.fromkeys(spellings("softmax log_softmax softmin"), within(along_dim)),
    **{
        f: within(spatial(k))
        for k in (1, 2, 3)
        for f in spellings(
            f"max_pool{k}d avg_pool{k}d adaptive_max_pool{k}d adaptive_avg_pool{k}d lp_pool{k}d"
        )
    },
    _VF._pack_padded_sequence: packed,
    _VF._pad_packed_sequence: unpacked,
}

MOVEMENT = frozenset(
    [
        *spellings("""
            view reshape squeeze unsqueeze flatten unflatten select transpose permute t expand
            movedim moveaxis swapaxes swapdims narrow split chunk unbind tensor_split view_as
            reshape_as expand_as repeat tile repeat_interleave flip roll adjoint ravel contiguous
            clone unfold diagonal tril triu __getitem__ squeeze_ unsqueeze_ transpose_ t_ hsplit
            vsplit split_with_sizes unsafe_chunk unsafe_split atleast_2d atleast_3d matrix_transpose
        """),
        torch.Tensor.T.__get__,  # type: ignore[attr-defined]
        torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
    ]
) - {F.unfold}  # it pads and takes no whole numbers, unlike the method of that name
"""Functions that put entries elsewhere and change none."""

LINEAR = (
    MOVEMENT | frozenset(spellings("sum mean nansum cat concat concatenate stack"))
) - IN_PLACE
"""Functions under which a sum over examples stays one."""

PICKS = frozenset(spellings("gather take take_along_dim masked_select"))
"""Functions that put entries elsewhere as an index or a mask says, which may be other each time."""
