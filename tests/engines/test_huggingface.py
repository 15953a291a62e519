"""Models nobody here wrote: tiny ones of Hugging Face, built from configurations, in float32.

Truth is the ``autograd`` engine on a copy in double. The models cast to float32 inside, so that a
mode has to turn these casts into double ones first.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded

import pytest
import torch
from single import Problem, Settled, trained
from torch.overrides import TorchFunctionMode

import seht
from seht.curvature.head import find_head
from seht.lab.bench.cases import images, text

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

WORDS = 20
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CLASSES = {"num_labels": 10, "problem_type": "single_label_classification"}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=WORDS, max_position_embeddings=8, **SMALL, **NO_DROPOUT
    )
    return transformers.BertForMaskedLM(config)


def vit():
    config = transformers.ViTConfig(
        image_size=12, patch_size=4, **SMALL, **NO_DROPOUT, **CLASSES
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def t5():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def llama():
    config = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=8, **SMALL)
    return transformers.LlamaForCausalLM(config)


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", **CLASSES
    )
    return transformers.ResNetForImageClassification(config)


# The module whose outputs the loss is taken of: the models return their own loss.
HEADS = {
    gpt2: "lm_head",
    bert: "cls",
    vit: "classifier",
    t5: "lm_head",
    llama: "lm_head",
    resnet: "classifier",
}
every_model = pytest.mark.parametrize(
    "build",
    [b if b is gpt2 else pytest.param(b, marks=pytest.mark.slow) for b in HEADS],
    ids=lambda build: build.__name__,
)


class Widened(TorchFunctionMode):
    """What would be cast to float32 is cast to float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        wide = lambda value: torch.float64 if value is torch.float32 else value
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


def own_loss(model, batch):
    x, y = batch
    if x.is_floating_point():
        return model(pixel_values=x, labels=y).loss
    return model(input_ids=x, labels=y).loss


def wide_loss(model, batch):
    with Widened():
        return own_loss(model, batch)


def sentences(draw):
    x, y = text(8, draw, vocabulary=WORDS, length=8)
    return x.t().contiguous(), y.t().contiguous()


def pictures(draw):
    return images(16, draw, channels=3, size=12)


def problem(build, steps):
    torch.manual_seed(0)
    model = build().train()
    return trained(model, pictures if build in (vit, resnet) else sentences, own_loss, steps)


def exact(single):
    double = single.double()
    return Problem(double.model, double.batch, wide_loss)


@every_model
@pytest.mark.parametrize(
    "steps", [0, pytest.param(50, marks=pytest.mark.slow)], ids=["fresh", "trained"]
)
@pytest.mark.supports("transformers: {build.__name__}", section="frameworks", engine="difference")
def test_accuracy(build, steps):
    single = problem(build, steps)
    truth = exact(single)
    ggn = {"curvature": "ggn", "boundary": HEADS[build]}
    for options, tolerance in (({}, 0.02), (ggn, 0.1), ({**ggn, "two_sided": True}, 0.02)):
        settled = Settled(single, options)
        for seed in range(2):
            value, g = settled.errors(truth, seed)
            assert g < tolerance
            assert value < tolerance
            assert settled.stated is None or g / 4 < settled.stated < 4 * g


@every_model
def test_the_head_of_a_model_that_returns_its_loss_is_found(build):
    single = problem(build, 0)
    found = []
    for name in (None, find_head(single.model)):
        penalty = seht.HessianTrace(
            single.model, weight=1e-3, curvature="ggn", boundary=name, seed=0
        )
        found.append(penalty(single.closure).item())
        assert penalty.last.trace > 0
    assert found[0] == found[1]
    assert seht.check(single.model, own_loss, single.batch, curvature="ggn", directions=1)


def test_a_model_that_hides_its_head_is_told_the_ways_out():
    """Called in a way of its own, so that nothing says that it puts out a loss."""
    single = problem(gpt2, 0)
    hidden = torch.nn.Module()
    hidden.inner = single.model
    hidden.forward = lambda x: single.model(input_ids=x, labels=x).loss
    penalty = seht.HessianTrace(hidden, weight=1e-3, curvature="ggn")
    with pytest.raises(RuntimeError, match=r'boundary="module\.name"'):
        penalty(lambda: hidden(single.batch[0]))
    penalty = seht.HessianTrace(hidden, weight=1e-3, curvature="ggn", boundary="lm_head")
    penalty(lambda: hidden(single.batch[0]))
    assert penalty.last.trace > 0


def test_two_heads_in_one_loss_are_not_taken_for_one():
    """The loss of the second would silently add nothing."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=1, n_head=2, num_labels=1
    )
    model = transformers.GPT2DoubleHeadsModel(config).eval()
    x = torch.randint(WORDS, (2, 2, 8))

    def closure():
        labels = {"labels": x, "mc_labels": torch.tensor([0, 1])}
        out = model(input_ids=x, mc_token_ids=torch.full((2, 2), 7), **labels)
        return out.loss + out.mc_loss

    with pytest.raises(RuntimeError, match=r'boundary="module\.name"'):
        seht.HessianTrace(model, weight=1e-3, curvature="ggn")(closure)


def test_a_model_may_look_closer_at_its_first_batch():
    """This one finds out in its first call what kind of labels it has, and keeps that."""
    torch.manual_seed(0)
    model = resnet()
    model.config.problem_type = None
    x, y = pictures(torch.Generator().manual_seed(1))
    penalty = seht.HessianTrace(model, weight=1e-3)
    for _ in range(2):
        penalty(lambda: own_loss(model, (x, y))).backward()
    assert model.config.problem_type == "single_label_classification"  # it did find out
    assert penalty.last.trace != 0


def test_the_truth_is_a_double_one():
    """Without the mode a double copy of Llama would compute its norms in float32."""
    single = problem(llama, 0)
    truth = exact(single)
    wide, narrow = (f(truth.model, truth.batch).item() for f in (wide_loss, own_loss))
    assert 1e-12 < abs(wide - narrow) < 1e-5
