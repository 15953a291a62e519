"""Every function of PyTorch has a row in the table of operators, or is known to need none.

A new PyTorch fails here with the names of its new functions. Look each of them up: has it a kink,
does autograd hold its result constant, are its second and third derivatives right? Then it gets a
row in ``seht/operators/``; else its name goes into one of the lists below.
"""

import inspect
from collections import Counter

import torch
import torch.nn.functional as F
from torch.overrides import get_overridable_functions, resolve_name

from seht.operators.table import KINKS, OPERATORS


def words(text):
    return set(text.split())


SMOOTH = words("""
    acos acosh arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atanh cosh sinh
    deg2rad rad2deg exp2 expit erfinv erfcx digamma psi polygamma lgamma gammaln mvlgamma
    multigammaln igamma igammac gammainc gammaincc i0 i1 sinc xlog1py entr log_ndtr ndtr ndtri zeta
    __ipow__ nextafter float_power ldexp logaddexp2 logcumsumexp logsumexp cumprod prod std std_mean
    var var_mean nanmean cov corrcoef cosine_similarity glu local_response_norm native_group_norm
    multilabel_soft_margin_loss soft_margin_loss ctc_loss kl_div poisson_nll_loss
    binary_cross_entropy_with_logits gru_cell lstm_cell rnn_tanh_cell polar complex airy_ai
    bessel_j0 bessel_j1 bessel_y0 bessel_y1 spherical_bessel_j0 modified_bessel_i0
    modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0
    scaled_modified_bessel_k1 chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
    chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
    legendre_polynomial_p shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
""")
"""Twice differentiable wherever they are defined, entry by entry or not."""

LINEAR = words("""
    upsample upsample_bilinear upsample_nearest grouped_mm addbmm addmv addr chain_matmul conv_tbc
    convolution cross dot ger inner kron matrix_power multi_dot mv outer tensordot vdot vecdot
    __rmatmul__ hsmm hspmm saddmm smm sspaddmm miopen_convolution miopen_convolution_transpose
    miopen_depthwise_convolution cumulative_trapezoid trapezoid trapz diff gradient trace
    sum_to_size fold unfold constant_pad_nd max_unpool1d max_unpool2d max_unpool3d affine_grid
    affine_grid_generator stft istft positive real imag conj conj_physical resolve_conj resolve_neg
    vander fft fft2 fftn fftshift hfft hfft2 hfftn ifft ifft2 ifftn ifftshift ihfft ihfft2 ihfftn
    irfft irfft2 irfftn rfft rfft2 rfftn
""")
"""Sums and products, polynomials in their arguments."""

MOVED = words("""
    as_strided as_strided_scatter atleast_1d block_diag broadcast_tensors broadcast_to
    cartesian_prod channel_shuffle native_channel_shuffle column_stack combinations diag diag_embed
    diagflat diagonal_scatter dsplit dstack fliplr flipud hstack meshgrid rot90 row_stack
    select_scatter slice_inverse slice_scatter vstack view_as_complex view_as_real
    unsafe_split_with_sizes __reversed__ index fill_ fill_diagonal_ zero_ alias_copy as_strided_copy
    ccol_indices_copy col_indices_copy crow_indices_copy diagonal_copy expand_copy indices_copy
    narrow_copy permute_copy row_indices_copy select_copy slice_copy split_copy
    split_with_sizes_copy squeeze_copy t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy
    values_copy view_as_complex_copy view_as_real_copy view_copy
""")
"""Entries put elsewhere."""

MATRICES = words("""
    cholesky cholesky_ex cholesky_inverse cholesky_solve det eig eigh eigvals eigvalsh
    frobenius_norm geqrf householder_product inv inv_ex inverse ldl_factor ldl_factor_ex ldl_solve
    lobpcg logdet lstsq lu lu_factor lu_factor_ex lu_solve lu_unpack norm_except_dim nuclear_norm
    orgqr ormqr pca_lowrank pinv pinverse qr slogdet solve solve_ex solve_triangular svd svd_lowrank
    svdvals tensorinv tensorsolve triangular_solve
""")
"""Smooth where they are defined, up to what the library chooses: pivots, signs of vectors."""

WHOLE = words("""
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor gcd lcm
    __and__ __iand__ __rand__ __or__ __ior__ __ror__ __xor__ __ixor__ __rxor__ __invert__ __lshift__
    __ilshift__ __rlshift__ __rshift__ __irshift__ __rrshift__ hash_tensor one_hot unravel_index
    isreal sym_float sym_int sym_ite sym_max sym_min sym_not sym_sum sym_sqrt _sym_int _sym_sqrt
    assert_int_or_pair
""")
"""Of whole numbers or of bits: what they are given is frozen."""

WITHOUT_GRADIENT = words("""
    scaled_mm scaled_grouped_mm __floordiv__ __ifloordiv__ __rfloordiv__ floor_divide_ histogram
    histogramdd native_norm apply_ map_ map2_ choose_qparams_optimized dequantize int_repr
    q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale q_zero_point qscheme
    quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic quantized_batch_norm
    quantized_gru_cell quantized_lstm_cell quantized_max_pool1d quantized_max_pool2d
    quantized_max_pool3d quantized_rnn_relu_cell quantized_rnn_tanh_cell fbgemm_linear_fp16_weight
    fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight
    fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_quantize_weight
    fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix batch_norm_backward_elemt
    batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
    batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats miopen_rnn
    miopen_convolution_add_relu miopen_convolution_relu
""")
"""Autograd refuses them, and so the loss has no gradient in any engine."""

NO_ARITHMETIC = words("""
    __array_wrap__ __complex__ __deepcopy__ __dlpack__ __dlpack_device__ __format__ __imod__ __len__
    __long__ __nonzero__ __reduce_ex__ __repr__ __setstate__ _autocast_to_full_precision
    _autocast_to_reduced_precision _clear_non_serializable_cached_data _coalesced_ _dimI _dimV
    _indices _is_view _nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides _nnz
    _sparse_mask_projection _to_dense _values autocast ccol_indices cdouble cfloat chalf coalesce
    col_indices const_data_ptr crow_indices cuda data_ptr dense_dim dim dim_order element_size
    get_device indices ipu is_coalesced is_complex is_conj is_contiguous is_distributed
    is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed
    manual_seed module_load mtia ndimension nelement numel pin_memory record_stream resize resize_
    resize_as resize_as_ resize_as_sparse_ row_indices set_ share_memory_ size sparse_dim
    sparse_mask sparse_resize_ sparse_resize_and_clear_ storage storage_offset storage_type to_dense
    to_mkldnn to_sparse untyped_storage values xpu
""")
"""Shapes, types, devices, memory; and operators of Python that end in functions with a row."""

KNOWN = SMOOTH | LINEAR | MOVED | MATRICES | WHOLE | WITHOUT_GRADIENT | NO_ARITHMETIC
ACCESS = {"__get__", "__set__", "__delete__"}


def functions():
    """Name and function of all that a function mode may be shown, and of all of F."""
    for home in get_overridable_functions().values():
        for function in home:
            if getattr(function, "__name__", "") not in ACCESS:  # attributes
                yield resolve_name(function).rsplit(".", 1)[-1], function
    for name, function in vars(F).items():
        if inspect.isroutine(function) and not name.startswith("_"):
            own = getattr(function, "__module__", None) in (F.__name__, None)
            if own and function not in get_overridable_functions()[F]:
                yield name, function


def missing(operators):
    rows = {f: row for row in operators for f in row.functions}
    found = {name: f for name, f in functions() if f not in rows and name not in KNOWN}

    def smooth_in_place(name: str) -> bool:
        """``cos_``: as smooth as ``cos``, which has a row and no kink, or is in a list."""
        base = name[:-1]
        homes = [getattr(home, base, None) for home in (torch, torch.Tensor)]
        return name.endswith("_") and (
            base in KNOWN or any(f in rows and rows[f].kink is None for f in homes)
        )

    return sorted(name for name in found if not smooth_in_place(name))


def test_every_function_has_a_row_or_is_known_to_need_none():
    assert missing(OPERATORS) == []


def test_a_kink_that_is_gone_is_missed():
    """Else the test above could not fail."""
    shown = {f for _, f in functions()}
    for row in OPERATORS:
        if row.kink is not None and not shown.isdisjoint(row.functions):
            assert missing([other for other in OPERATORS if other is not row]), row


def test_no_function_has_two_rows():
    count = Counter(f for row in OPERATORS for f in row.functions)
    assert [f for f, times in count.items() if times > 1] == []


def test_what_is_called_smooth_has_no_rule():
    named = {getattr(f, "__name__", "") for f in KINKS}
    assert (SMOOTH | LINEAR | MOVED) & named <= {"kl_div"}
