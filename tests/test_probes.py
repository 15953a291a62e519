"""Which tensors are chosen, and how the directions are drawn."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seht import probes
from seht.probes import choose


def network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    )


def names(model, params=None):
    return list(choose(model, params).tensors)


# --- choose -----------------------------------------------------------------------------------


def test_default_is_every_trainable_tensor_of_two_or_more_dimensions():
    model = network()
    assert names(model) == ["0.weight", "4.weight"]
    model[0].weight.requires_grad_(False)
    assert names(model) == ["4.weight"]
    assert choose(model).tensors["4.weight"] is model[4].weight
    assert choose(model).named == frozenset()


@pytest.mark.parametrize(
    "params, expected",
    [
        ("4.weight", ["4.weight"]),
        (["4.bias", "0.weight"], ["0.weight", "4.bias"]),  # in the model's order
        (("4.*",), ["4.weight", "4.bias"]),
        ("*", ["0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"]),
        ("*.bias", ["0.bias", "1.bias", "4.bias"]),
        ("[01].weight", ["0.weight", "1.weight"]),
        (["4.*", "4.weight"], ["4.weight", "4.bias"]),
        ((n for n in ["0.bias"]), ["0.bias"]),
        (lambda name, tensor: tensor.dim() == 4, ["0.weight"]),
        (lambda name, tensor: name.startswith("1"), ["1.weight", "1.bias"]),
    ],
)
def test_names_patterns_and_predicates(params, expected):
    assert names(network(), params) == expected


def test_only_names_are_named():
    """Named tensors must be used by the loss; those that a pattern happens to match need not."""
    assert choose(network(), ["0.weight", "4.*"]).named == {"0.weight"}
    assert choose(network(), lambda name, tensor: True).named == frozenset()


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "_forward_module.module."],
)
def test_prefixes_of_wrappers_do_not_matter(prefix):
    model = wrapped = network()
    for part in reversed(prefix.rstrip(".").split(".")):
        outer = nn.Module()
        outer.add_module(part, wrapped)
        wrapped = outer
    assert names(wrapped) == names(model)
    assert names(wrapped, f"{prefix}4.weight") == ["4.weight"]
    assert names(model, f"{prefix}4.weight") == ["4.weight"]
    assert names(wrapped, "4.*") == ["4.weight", "4.bias"]
    assert probes.clean_name(f"a.{prefix}b") == "a.b"


def test_a_tied_tensor_counts_once_under_its_first_name():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "decode": nn.Linear(3, 5, bias=False)})
    model["decode"].weight = model["embed"].weight
    assert names(model) == ["embed.weight"]
    chosen = choose(model, "decode.weight")
    assert list(chosen.tensors) == ["embed.weight"]
    assert chosen.named == {"embed.weight"}
    assert names(model, "decode.*") == ["embed.weight"]


def test_a_submodule_that_happens_to_be_called_module():
    model = nn.Module()
    model.module = nn.ModuleDict({"head": nn.Linear(3, 4)})
    model.head = nn.Linear(4, 2)
    tensors = list(choose(model).tensors.values())
    assert len(tensors) == 2
    assert any(t is model.head.weight for t in tensors)
    assert any(t is model.module["head"].weight for t in tensors)


@pytest.mark.parametrize(
    "params, error, message",
    [
        ("4.weigth", ValueError, r"no parameter.*'4.weigth'; did you mean '4.weight'"),
        ("conv*", ValueError, r"no parameter.*'conv\*'.*named_parameters"),
        (["4.weight", "nothing"], ValueError, "'nothing'"),
        ([], ValueError, "chooses no trainable parameter"),
        (lambda name, tensor: False, ValueError, "chooses no trainable parameter"),
        ([3], TypeError, "names or glob patterns, not int.*predicate"),
    ],
)
def test_bad_choices(params, error, message):
    with pytest.raises(error, match=message):
        choose(network(), params)


def test_frozen_models_and_models_without_matrices():
    model = network().requires_grad_(False)
    with pytest.raises(ValueError, match=r"every parameter.*frozen.*requires_grad_\(True\)"):
        choose(model)
    model[0].weight.requires_grad_()
    with pytest.raises(ValueError, match=r"'4.weight' is frozen"):
        choose(model, ["0.weight", "4.weight"])
    assert names(model, "*.weight") == ["0.weight"]  # a pattern passes over what is frozen
    with pytest.raises(ValueError, match=r"two or more dimensions.*params"):
        choose(nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match="no parameters"):
        choose(nn.ReLU())


def test_several_devices_and_complex_weights():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"several devices.*params="):
        choose(model)
    assert names(model, "0.weight") == ["0.weight"]
    complex_ = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r"'weight' is torch.complex64"):
        choose(complex_)


# --- seeds ------------------------------------------------------------------------------------


def test_call_seeds_share_the_layers_of_their_step():
    seeds = [probes.call_seed(3, step, call) for step in range(50) for call in range(4)]
    assert len(set(seeds)) == 200
    layers = [probes.layer_seed(seed) for seed in seeds]
    assert len(set(layers)) == 50
    assert all(len(set(layers[i : i + 4])) == 1 for i in range(0, 200, 4))
    assert all(0 <= seed < 2**63 for seed in seeds)


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
def test_mix_is_a_function_onto_64_bits(values):
    assert probes.mix(*values) == probes.mix(*values)
    assert 0 <= probes.mix(*values) < 2**64
    assert probes.mix(*values) != probes.mix(*values, 0)


def test_mix_changes_half_of_the_bits():
    flips = [
        (probes.mix(seed, 2) ^ probes.mix(seed ^ (1 << bit), 2)).bit_count()
        for seed in range(20)
        for bit in range(64)
    ]
    assert abs(sum(flips) / len(flips) - 32) < 0.5  # five standard errors, 4 / sqrt(1280) each


def test_entry_seeds_differ():
    seeds = {
        probes.entry_seed(s, k, i) for s in range(10) for k in range(10) for i in range(10)
    } | {probes.layer_seed(s) for s in range(10)}
    assert len(seeds) == 1010


def test_drawing_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    shape = torch.Size([5, 7])
    probes.rademacher(shape, 1), probes.sparse_signs(shape, 0.1, 1), probes.gaussian(shape, 1)
    assert torch.equal(torch.get_rng_state(), before)


# --- distributions ----------------------------------------------------------------------------

DRAWS = {
    "rademacher": lambda shape, seed: probes.rademacher(shape, seed),
    "sparse": lambda shape, seed: probes.sparse_signs(shape, 0.2, seed),
    "gaussian": lambda shape, seed: probes.gaussian(shape, seed),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_functions_of_the_seed(name):
    draw, shape = DRAWS[name], torch.Size([3, 50])
    torch.manual_seed(1)
    first = draw(shape, 11)
    torch.manual_seed(2)
    assert torch.equal(draw(shape, 11), first)
    assert not torch.equal(draw(shape, 12), first)
    assert first.shape == shape
    assert first.dtype == (torch.float32 if name == "gaussian" else torch.int8)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (63,), (64,), (65,), (2, 3, 5, 7), (130, 2)])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_every_shape(name, shape):
    entries = DRAWS[name](torch.Size(shape), 5)
    assert entries.shape == shape
    if name != "gaussian":
        assert set(entries.flatten().tolist()) <= ({-1, 1} if name == "rademacher" else {-1, 0, 1})


# Five standard errors; with fixed seeds each of these is decided once and for all.
Z, SIZE = 5, 200_000


def z(sample, mean, variance):
    return abs(sample.double().mean().item() - mean) / math.sqrt(variance / sample.numel())


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_rademacher_is_fair_and_independent(seed):
    s = probes.rademacher(torch.Size([SIZE]), seed).double()
    assert z(s, 0, 1) < Z
    # Neighbours, neighbouring bytes and neighbouring words of the generator.
    for lag in (1, 2, 7, 8, 32, 63, 64, 65, 1000):
        assert z(s[lag:] * s[:-lag], 0, 1) < Z
    # Each of the 64 places in a word by itself.
    places = s[: SIZE // 64 * 64].view(-1, 64)
    assert max(z(places[:, i], 0, 1) for i in range(64)) < Z


@pytest.mark.parametrize("prob", [0.5, 0.3, 0.05, 0.01])
def test_sparse_signs_follow_q(prob):
    s = probes.sparse_signs(torch.Size([SIZE]), prob, 3).double()
    for value, share in ((1, prob), (-1, prob), (0, 1 - 2 * prob)):
        assert z((s == value).double(), share, share * (1 - share) or 1e-30) < Z
    assert z(s[1:] * s[:-1], 0, (2 * prob) ** 2) < Z
    if prob == 0.5:
        assert (s != 0).all()


def test_gaussian_moments():
    s = probes.gaussian(torch.Size([SIZE]), 3).double()
    assert z(s, 0, 1) < Z
    assert z(s**2, 1, 2) < Z
    assert z(s**4, 3, 96) < Z


def test_different_seeds_are_independent():
    shape = torch.Size([SIZE])
    seeds = [probes.entry_seed(seed, k, i) for seed in (0, 1) for k in (0, 1) for i in (0, 1)]
    draws = [probes.rademacher(shape, seed).double() for seed in seeds]
    for i, a in enumerate(draws):
        assert all(z(a * b, 0, 1) < Z for b in draws[:i])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rademacher", "gaussian"])
def test_draws_on_the_gpu(name):
    draw, shape = getattr(probes, name), torch.Size([1000])
    entries = draw(shape, 5, "cuda")
    assert entries.device.type == "cuda"
    assert torch.equal(entries, draw(shape, 5, "cuda"))
