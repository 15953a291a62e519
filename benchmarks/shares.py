"""How strong is one and the same weight on three networks?

    python benchmarks/shares.py --json results/shares.json       # some minutes on one thread
    python benchmarks/shares.py --steps 10 --only readme lora    # some seconds

The README's network on its random data; LoRA on a small GPT-2 (from a configuration, on the letters
of Python's own documentation); EfficientNet-Lite0 with its ImageNet weights and a new last layer,
on enlarged digits. Each is trained without a penalty, and asked on every step what `weight=1e-3`
would have been: the penalty over the loss (values), and its gradient over the loss's own (averaged,
as `share=` has it). Means over the first and the last ten steps. Needs the extras `finetune` and
`huggingface`. The table is in docs/which-weight.md.
"""

import argparse
import importlib.util
import json
import os
import statistics
import warnings
from pathlib import Path
from pydoc_data.topics import topics

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import nn

import seht

WEIGHT = 1e-3


def readme():
    """As printed there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    x, y = torch.randn(128, 20), torch.randint(0, 3, (128,))
    loss = lambda batch: F.cross_entropy(model(batch[0]), batch[1])
    return model, loss, [(x, y)], torch.optim.SGD(model.parameters(), 0.1), {}


def lora():
    """Adapters of rank 4 on the attention of four layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    text = "".join(topics[name] for name in sorted(topics))[:60_000]
    letters = sorted(set(text))
    tokens = torch.tensor([letters.index(letter) for letter in text])
    batches = list(tokens[: 100 * 8 * 64].view(100, 8, 64))
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=128, n_layer=4, n_head=4, vocab_size=len(letters), n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    adapter = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel(config), adapter).train()
    loss = lambda batch: model(input_ids=batch, labels=batch).loss
    weights = [p for p in model.parameters() if p.requires_grad]
    return model, loss, batches, torch.optim.AdamW(weights, 3e-3), {"boundary": "lm_head"}


def efficientnet():
    """All of it is trained, on digits of 96 pixels a side, in three colours."""
    from sklearn.datasets import load_digits

    from seht.lab.models.lite0 import pretrained

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[:400] / 8 - 1
    images = F.interpolate(images, (96, 96), mode="bicubic").expand(-1, 3, -1, -1)
    labels = torch.tensor(digits.target)[:400]
    torch.manual_seed(0)
    model = pretrained().train()
    model._fc = nn.Linear(model._fc.in_features, 10)
    loss = lambda batch: F.cross_entropy(model(batch[0]), batch[1])
    batches = list(zip(images.split(8), labels.split(8), strict=True))
    return model, loss, batches, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), {}


MODELS = {
    "lora": ("LoRA on a small GPT-2", lora, ("peft", "transformers")),
    "readme": ("the README's network", readme, ()),
    "lite0": ("EfficientNet-Lite0, pretrained", efficientnet, ("efficientnet_lite_pytorch",)),
}


def measure(make, curvature, steps):
    """The penalty over the loss on each step, and the share that averaged gradients have."""
    model, loss_of, batches, optimizer, options = make()
    options |= {"curvature": curvature, "seed": 0}
    given = seht.HessianTrace(model, weight=WEIGHT, **options)
    share = seht.HessianTrace(model, share=1.0, follow=True, **options)
    values, shares = [], []
    for step in range(steps):
        batch = batches[step % len(batches)]
        for penalty in (given, share):
            penalty(lambda: loss_of(batch))
        values.append(given.last.penalty / given.last.loss)
        if share.last.weight:
            shares.append(WEIGHT / share.last.weight)
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
    return values, shares


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--curvature", nargs="+", default=["ggn"])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path, help="write the steps here, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", seht.PenaltyWarning)
    found = {}
    print(f"weight={WEIGHT:g}: penalty over loss, and share of gradients; first and last ten steps")
    for name, make, needs in (MODELS[chosen] for chosen in given.only):
        if any(importlib.util.find_spec(package) is None for package in needs):
            print(f"{name}: not installed")
            continue
        for curvature in given.curvature:
            values, shares = measure(make, curvature, given.steps)
            found[f"{name}, {curvature}"] = {
                said: [float(f"{value:.4g}") for value in column]
                for said, column in (("penalty over loss", values), ("share", shares))
            }
            first, last, early, late = (
                f"{100 * statistics.fmean(part):.2g} %"
                for part in (values[:10], values[-10:], shares[:10], shares[-10:])
            )
            print(f"{name:32}{curvature:9}{first:>9}{last:>9}   {early:>9}{late:>9}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
