"""The weight finds itself, in every framework: 40 % of the labels are wrong, 60 images held out.

A plain loop tunes it and trains again on all images by the path found. Lightning, Fabric, Hugging
Face and Accelerate follow where they are installed. Run it with `python examples/tuned_weight.py`.
"""

import importlib.util
import logging
import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import seht
from seht.integrations import training

digits = load_digits()
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 16
labels = torch.tensor(digits.target)[order]
wrong = torch.rand(300, generator=torch.Generator().manual_seed(1)) < 0.4
seen = labels[:300].clone()
seen[wrong] = torch.randint(0, 10, (300,), generator=torch.Generator().manual_seed(2))[wrong]
train, held_out, every = slice(0, 240), slice(240, 300), slice(0, 300)
SETTINGS = {"curvature": "ggn", "warmup": 0.1, "every": 2, "seed": 0}
EPOCHS = 30


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 10),
    )  # fmt: skip


def loader(part):
    return DataLoader(TensorDataset(images[part], seen[part]), 50, shuffle=part != held_out)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model):
    with torch.no_grad():
        return (model(images[300:]).argmax(1) == labels[300:]).float().mean().item()


def report(name, model, penalty):
    weight = "" if penalty.path is None else f", weight {penalty.path.weights[-1]:.2g}"
    print(f"{name:24} test accuracy {accuracy(model):.3f}, trace {penalty.guard.trace:.1f}{weight}")


def loop(part, stop=None, **options):
    """A training loop as anybody writes it; with `stop` the penalty is made anew in that epoch."""
    model, batches = network(), loader(part)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    options |= {**SETTINGS, "total_steps": EPOCHS * len(batches), "optimizer": optimizer}
    penalty = seht.HessianTrace(model, **options)
    for epoch in range(EPOCHS):
        if epoch == stop:
            state = penalty.state_dict()
            penalty = seht.HessianTrace(model, **options)
            penalty.load_state_dict(state)
        for batch in batches:
            optimizer.zero_grad()
            penalty(lambda: loss_fn(model, batch)).backward()
            optimizer.step()
    return model, penalty


report("without a penalty", *loop(train, weight=0.0))
tuned = {"held_out": (loader(held_out), loss_fn)}
model, penalty = loop(train, **tuned)
report("tuned", model, penalty)
report("again, on all images", *loop(every, weight=penalty.path))
report("the default, on all", *loop(every))


def lightning():
    import lightning as L

    from seht.integrations.lightning import SehtCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Digits(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()
            self.penalty = seht.HessianTrace(self.net, **SETTINGS)

        def training_step(self, batch):
            return self.penalty(lambda: loss_fn(self.net, batch))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    module = Digits()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=EPOCHS, callbacks=[SehtCallback(held_out=(loader(held_out), loss_fn))],
            accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=folder,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, loader(train))
    report("Lightning", module.net, module.penalty)


def fabric():
    from lightning import Fabric

    runner = Fabric(accelerator="cpu")
    model = network()
    model, optimizer = runner.setup(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
    batches = runner.setup_dataloaders(loader(train))
    others = (runner.setup_dataloaders(loader(held_out)), loss_fn)
    penalty = seht.HessianTrace(model, **SETTINGS)
    with training(penalty, batches, EPOCHS, optimizer=optimizer, held_out=others):
        for _ in range(EPOCHS):
            for batch in batches:
                optimizer.zero_grad()
                runner.backward(penalty(lambda: loss_fn(model, batch)))
                optimizer.step()
    report("Fabric", model, penalty)


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer, batches, others = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), loader(train),
        loader(held_out),
    )  # fmt: skip
    penalty = seht.HessianTrace(model, **SETTINGS)
    with training(penalty, batches, EPOCHS, optimizer=optimizer, held_out=(others, loss_fn)):
        for _ in range(EPOCHS):
            for batch in batches:
                optimizer.zero_grad()
                accelerator.backward(penalty(lambda: loss_fn(model, batch)))
                optimizer.step()
    report("Accelerate", model, penalty)


def hugging_face():
    from transformers import TrainingArguments, logging

    from seht.integrations.huggingface import SehtTrainer

    logging.set_verbosity_error()

    class Wrapped(nn.Module):  # these models return their own loss
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, labels):
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def rows(part):
        return [{"x": x, "labels": y} for x, y in zip(images[part], seen[part], strict=True)]

    model = Wrapped()
    penalty = seht.HessianTrace(model, boundary="net", **SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, num_train_epochs=EPOCHS, per_device_train_batch_size=50,
            per_device_eval_batch_size=50, learning_rate=3e-3, report_to="none", use_cpu=True,
            disable_tqdm=True, save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        trainer = SehtTrainer(
            model=model, args=args, train_dataset=rows(train), held_out=rows(held_out),
            penalty=penalty,
        )  # fmt: skip
        trainer.train()
    report("Hugging Face (AdamW)", model.net, penalty)


for needs, run in (
    ("lightning", lightning),
    ("lightning", fabric),
    ("accelerate", accelerate),
    ("transformers", hugging_face),
):
    if importlib.util.find_spec(needs) is not None:
        run()
resumed, _ = loop(train, stop=EPOCHS // 2, **tuned)
pairs = zip(model.parameters(), resumed.parameters(), strict=True)
print("resumed run identical:", all(torch.equal(a, b) for a, b in pairs))
