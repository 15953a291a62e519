"""find_head: the module whose outputs are the logits, in models nobody here wrote."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded

import pytest
import torch
from torch import nn

import seht
from seht.curvature.head import find_head, find_module

transformers = pytest.importorskip("transformers")

GPT2 = dict(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=16)
GPT2 |= dict(bos_token_id=1, eos_token_id=2)
BERT = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
BERT |= dict(vocab_size=40)
T5 = dict(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=40)
VIT = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
VIT |= dict(image_size=8, patch_size=4)

MODELS = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2, "lm_head"),
    "GPT2ForSequenceClassification": ("GPT2Config", GPT2, "score"),
    "BertForMaskedLM": ("BertConfig", BERT, "cls.predictions.decoder"),
    "BertForSequenceClassification": ("BertConfig", BERT, "classifier"),
    "BertForQuestionAnswering": ("BertConfig", BERT, "qa_outputs"),
    "BertModel": ("BertConfig", BERT, None),
    "T5ForConditionalGeneration": ("T5Config", T5, "lm_head"),
    "LlamaForCausalLM": ("LlamaConfig", BERT, "lm_head"),
    "ViTForImageClassification": ("ViTConfig", VIT, "classifier"),
}


def make(name):
    config, options, _ = MODELS[name]
    return getattr(transformers, name)(getattr(transformers, config)(**options))


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_transformers(name):
    assert find_head(make(name)) == MODELS[name][2]


def test_the_head_is_a_boundary():
    model, tokens = make("GPT2LMHeadModel"), torch.randint(40, (2, 8))
    penalty = seht.HessianTrace(model, weight=1e-3, curvature="ggn", boundary=find_head(model))
    penalty(lambda: model(tokens, labels=tokens).loss).backward()
    assert penalty.last.trace > 0


@pytest.mark.parametrize("targets", [["c_attn"], ["c_attn", "lm_head"]])
def test_adapters(targets):
    peft = pytest.importorskip("peft")
    model = make("GPT2LMHeadModel")
    options = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=True)
    assert find_head(peft.get_peft_model(model, options)) == "base_model.model.lm_head"


def test_a_model_inside_another():
    assert find_head(nn.ModuleDict({"net": make("GPT2LMHeadModel")})) == "net.lm_head"
    assert find_head(torch.compile(make("GPT2LMHeadModel"))) == "lm_head"


def test_two_heads_are_none():
    both = [make("GPT2LMHeadModel"), make("GPT2LMHeadModel")]
    assert find_head(nn.ModuleList(both)) is None


def test_ordinary_networks_have_none():
    net = nn.Sequential(nn.Linear(2, 2))
    net.classifier = nn.Linear(2, 2)  # its own outputs are the network's
    assert find_head(net) is None
    net.lm_head = nn.Linear(2, 2)
    assert find_head(net) == "lm_head"


def test_the_end_of_a_name_is_enough():
    net = nn.ModuleDict({"base": make("GPT2LMHeadModel")})
    assert find_module(net, "lm_head") is net["base"].lm_head
    assert find_module(net, "0.attn.c_attn") is net["base"].transformer.h[0].attn.c_attn
    with pytest.raises(ValueError, match=r"did you mean 'base.lm_head'.*head is 'base.lm_head'"):
        find_module(net, "base.lm_hed")
    with pytest.raises(ValueError, match=r"2 modules 'lm_head'.*'a.lm_head', 'b.lm_head'"):
        find_module(
            nn.ModuleDict({"a": make("GPT2LMHeadModel"), "b": make("GPT2LMHeadModel")}), "lm_head"
        )


def test_a_whole_name_wins_over_an_end():
    net = nn.ModuleDict({"head": nn.Linear(2, 2), "inner": nn.ModuleDict({"head": nn.Tanh()})})
    assert find_module(net, "head") is net["head"]
    assert find_module(net, "inner.head") is net["inner"]["head"]


def test_a_quantised_base_is_left_out_and_said():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.randint(-8, 8, (6, 4), dtype=torch.int8)
            self.weight = nn.Parameter(whole, requires_grad=False)
            self.adapter = nn.Linear(4, 6)

        def forward(self, x):
            return x @ (self.weight.t().to(x.dtype) / 8) + self.adapter(x)

    torch.manual_seed(0)
    model, x, y = Quantised(), torch.randn(8, 4), torch.randint(6, (8,))
    with pytest.warns(seht.PenaltyWarning, match="1 weights of the model are quantised"):
        penalty = seht.HessianTrace(model, weight=1.0, curvature="ggn", seed=0)
    closure = lambda: torch.nn.functional.cross_entropy(model(x), y)
    penalty.backward(closure)
    assert penalty.last.layers == ("adapter.weight",) and penalty.last.trace > 0
