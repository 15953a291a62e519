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

from seht.engines.kinks import spellings
from seht.engines.persample.arithmetic import (
    additive,
    all_but_first,
    along_dim,
    batch_normed,
    divided,
    elementwise,
    loss,
    reduced,
    scaled,
    spatial,
    trailing,
    within,
)
from seht.engines.persample.calls import Follow
from seht.engines.persample.movement import indexed, joined, packed, stacked, unpacked

_VF = torch._C._VariableFunctions

AXES: dict[Any, Follow] = {
    **dict.fromkeys(
        spellings("""
            relu relu_ relu6 relu6_ leaky_relu leaky_relu_ elu elu_ selu selu_ celu celu_ gelu silu
            mish hardswish hardswish_ hardsigmoid hardsigmoid_ hardtanh hardtanh_ softplus
            sigmoid sigmoid_ tanh tanh_ logsigmoid tanhshrink softshrink hardshrink threshold
            threshold_ exp exp_ expm1 log log1p log2 log10 sqrt sqrt_ rsqrt square sin cos tan
            erf erfc abs abs_ sign reciprocal pow pow_ __pow__ __rpow__ clamp clamp_ clip clip_
            clamp_min clamp_max maximum minimum fmax fmin where lerp addcdiv dropout
            dropout_ alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d
            feature_dropout masked_fill masked_fill_ nan_to_num atan2 xlogy logaddexp hypot
            detach clone contiguous float double half bfloat16 to type type_as requires_grad_ cpu
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
            __iadd__ __isub__
        """),
        additive,
    ),
    **dict.fromkeys(
        spellings("mul mul_ multiply __mul__ __rmul__ __imul__ addcmul addcmul_"), scaled
    ),
    **dict.fromkeys(
        spellings("div div_ divide true_divide __truediv__ __rdiv__ __itruediv__ __div__"),
        divided,
    ),
    **dict.fromkeys(spellings("sum mean nansum"), reduced),
    F.cross_entropy: loss(True, at=6),
    F.nll_loss: loss(True, at=6),
    F.mse_loss: loss(False, at=4),
    F.binary_cross_entropy: loss(False, at=5),
    F.binary_cross_entropy_with_logits: loss(False, at=5),
    F.kl_div: loss(False, at=4),
    F.poisson_nll_loss: loss(False, at=7),
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

LINEAR = frozenset(
    spellings("""
        sum mean nansum view reshape squeeze unsqueeze flatten unflatten __getitem__ select
        transpose permute t expand float double to clone contiguous cat stack movedim unbind
        split chunk view_as reshape_as
    """)
)
"""Functions under which a sum over examples stays one."""

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
