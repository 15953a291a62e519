"""Hugging Face's Trainer: a loop by hand arrives at the same weights, whoever scales the loss."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded

import pytest
import torch
from runs import assert_same
from torch import nn

import seht

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from seht.integrations.huggingface import STATE, SehtMixin, SehtTrainer  # noqa: E402

transformers.logging.set_verbosity_error()

STEPS, BATCH, ACCUMULATE, CLIP, WORDS = 6, 4, 2, 0.5, 12
OPTIONS = {"weight": 0.01, "warmup": 2, "accumulate": ACCUMULATE, "seed": 5}


def gpt2(dropout=0.0):
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=dropout, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Classifier(nn.Module):
    """A model that takes no keywords for its loss: the Trainer divides it by the batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Embedding(WORDS, 6), nn.Flatten(), nn.ReLU())
        self.head = nn.Linear(48, 3)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.body(input_ids))
        out = {"logits": logits}
        return (
            out if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **out}
        )


def sentences():
    words = torch.randint(WORDS, (BATCH * ACCUMULATE * STEPS, 8), generator=generator())
    labels = words.clone()
    labels[::3, 4:] = -100  # batches of different numbers of tokens
    labels[:, 0] = -100  # nothing predicts them, and not every Trainer leaves them out of its count
    return [{"input_ids": x, "labels": y} for x, y in zip(words, labels, strict=True)]


def classes():
    words = torch.randint(WORDS, (BATCH * ACCUMULATE * STEPS, 8), generator=generator())
    return [{"input_ids": x, "labels": x.sum() % 3} for x in words]


def generator():
    return torch.Generator().manual_seed(3)


def by_hand(model, rows, weights_of, **options):
    """One step at a time; ``weights_of`` says what each of its batches counts for."""
    penalty = seht.HessianTrace(model, **{**OPTIONS, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records = []
    model.train()
    batches = [
        {name: torch.stack([row[name] for row in rows[i : i + BATCH]]) for name in rows[0]}
        for i in range(0, len(rows), BATCH)
    ]
    for step in range(STEPS):
        parts = batches[step * ACCUMULATE : (step + 1) * ACCUMULATE]
        for batch, (inner, outer) in zip(parts, weights_of(parts), strict=True):
            loss = penalty(lambda: inner(model, batch))
            (outer * loss).backward()
            records.append(penalty.last)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), records


def summed(parts):
    """Each batch's loss over the tokens of the whole step, added up."""
    count = sum((batch["labels"] != -100).sum() for batch in parts)
    return [(lambda m, b: m(**b, num_items_in_batch=count).loss, 1.0) for _ in parts]


def averaged(parts):
    return [(lambda m, b: m(**b)["loss"], 1 / len(parts)) for _ in parts]


class Noting(SehtMixin, transformers.Trainer):
    """Keeps the record of every call, and trains in the order of the rows."""

    def compute_loss(self, *args, **kwargs):
        out = super().compute_loss(*args, **kwargs)
        if torch.is_grad_enabled():
            self.records = [*getattr(self, "records", []), self.penalty.last]
        return out

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer_of(folder, model, rows, kind=Noting, penalty=None, **options):
    if penalty is None:
        penalty = seht.HessianTrace(model, **OPTIONS)
    arguments = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATE, "max_grad_norm": CLIP, "learning_rate": 0.1,
        "lr_scheduler_type": "constant", "optim": "sgd", "seed": 7, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no",
        "remove_unused_columns": False,
    }  # fmt: skip
    args = transformers.TrainingArguments(**{**arguments, **options})
    return kind(model=model, args=args, train_dataset=rows, eval_dataset=rows[:8], penalty=penalty)


GGN = {"curvature": "ggn", "boundary": "lm_head"}


@pytest.mark.parametrize("options", [GGN, pytest.param({}, marks=pytest.mark.slow)])
@pytest.mark.supports("Hugging Face Trainer", section="frameworks", engine="difference")
def test_a_loss_that_is_summed_over_the_accumulated_batches(tmp_path, options):
    truth, records = by_hand(gpt2(), sentences(), summed, **options)
    model = gpt2()
    penalty = seht.HessianTrace(model, **OPTIONS, **options)
    trainer = trainer_of(tmp_path, model, sentences(), penalty=penalty)
    trainer.train()
    assert trainer.model_accepts_loss_kwargs
    assert_same(model.state_dict(), truth)
    assert trainer.records == records
    logged = [row for row in trainer.state.log_history if "seht/trace" in row]
    assert [row["seht/trace"] for row in logged] == [
        r.trace for r in trainer.records[1::ACCUMULATE] if r.trace is not None
    ]
    names = {"seht/loss", "seht/penalty_over_loss", "seht/penalty"}
    assert names <= trainer.state.log_history[0].keys()
    before = penalty.state_dict()
    assert "seht/trace" not in trainer.evaluate()  # under no_grad, and no step of the penalty's
    assert penalty.state_dict() == before


@pytest.mark.supports("Hugging Face Trainer", section="frameworks", engine="difference")
def test_a_loss_that_is_averaged(tmp_path):
    truth, _ = by_hand(Classifier(), classes(), averaged)
    model = Classifier()
    trainer = trainer_of(tmp_path, model, classes(), label_names=["labels"])
    trainer.train()
    assert not trainer.model_accepts_loss_kwargs
    assert_same(model.state_dict(), truth)


def test_labels_that_the_trainer_takes_out(tmp_path):
    """Label smoothing pops them from the inputs, and the closure runs more than once."""
    model = gpt2()
    trainer = trainer_of(tmp_path, model, sentences(), label_smoothing_factor=0.1)

    def smoothed(parts):
        count = sum((batch["labels"] != -100).sum() for batch in parts)
        own = lambda m, b: transformers.Trainer.compute_loss(
            trainer, m, dict(b), num_items_in_batch=count
        )
        return [(own, 1.0) for _ in parts]

    truth, records = by_hand(gpt2(), sentences(), smoothed)
    trainer.train()
    assert trainer.records == records and records[-1].trace is not None
    assert_same(model.state_dict(), truth)


@pytest.mark.parametrize("resume", [True, pytest.param("path", marks=pytest.mark.slow)])
@pytest.mark.supports("Hugging Face Trainer, resumed", section="frameworks", engine="difference")
def test_resumed(tmp_path, resume):
    whole = gpt2(dropout=0.1)
    trainer = trainer_of(tmp_path / "whole", whole, sentences())
    trainer.train()
    first = trainer_of(
        tmp_path / "run", gpt2(0.1), sentences(), save_strategy="steps", save_steps=3, max_steps=3
    )
    first.train()
    folder = tmp_path / "run" / "checkpoint-3"
    assert (folder / STATE).exists()
    model = gpt2(0.1)
    penalty = seht.HessianTrace(model, **{**OPTIONS, "seed": 99})
    second = trainer_of(tmp_path / "run", model, sentences(), penalty=penalty)
    second.train(resume_from_checkpoint=True if resume is True else str(folder))
    assert second.records == trainer.records[3 * ACCUMULATE :]
    assert_same(model.state_dict(), whole.state_dict())


def test_a_checkpoint_without_a_penalty(tmp_path):
    trainer = trainer_of(
        tmp_path, gpt2(), sentences(), save_strategy="steps", save_steps=1, max_steps=1
    )
    trainer.train()
    (tmp_path / "checkpoint-1" / STATE).unlink()
    again = trainer_of(tmp_path, gpt2(), sentences(), max_steps=2)
    with pytest.warns(seht.PenaltyWarning, match=r"seht\.pt is missing.*step 0"):
        again.train(resume_from_checkpoint=True)
    assert again.penalty.step == 1


@pytest.mark.supports(
    "Hugging Face Trainer, model_init", section="frameworks", engine="difference", cell="refused"
)
def test_what_the_penalty_cannot_know(tmp_path):
    model = gpt2()
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    penalty = seht.HessianTrace(model, weight=1e-3)
    with pytest.raises(ValueError, match="pass model= instead"):
        SehtTrainer(model_init=gpt2, args=args, penalty=penalty)
    loss_fn = lambda m, b: m(**b)
    for others in (([], loss_fn), loss_fn, torch.utils.data.DataLoader(classes())):
        with pytest.raises(TypeError, match=r"held_out must be a data set.*leave loss_fn out"):
            SehtTrainer(model=model, args=args, penalty=penalty, held_out=others)
    args.gradient_accumulation_steps = 4
    with pytest.warns(seht.PenaltyWarning, match=r"accumulate=4\)"):
        SehtTrainer(model=model, args=args, penalty=penalty)


def test_the_length_of_the_training(tmp_path):
    """Half of it is a warm-up; and one that never ends is said."""
    found = []

    class Noting(SehtTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            found.append(self.penalty.last.trace is not None)
            return loss

    def train(warmup):
        model = Classifier()
        penalty = seht.HessianTrace(model, **{**OPTIONS, "warmup": warmup})
        trainer_of(tmp_path, model, classes(), kind=Noting, penalty=penalty).train()

    train(0.5)
    assert found == [False] * (STEPS * ACCUMULATE // 2) + [True] * (STEPS * ACCUMULATE // 2)
    model = Classifier()  # three batches in steps of two: each epoch ends early, with one batch
    penalty = seht.HessianTrace(model, **{**OPTIONS, "warmup": 0.5})
    rows, length = classes()[: 3 * BATCH], {"max_steps": -1, "num_train_epochs": 4}
    trainer_of(tmp_path, model, rows, penalty=penalty, **length).train()
    assert penalty.schedule.total_steps == penalty.step == 4 * 3 // ACCUMULATE
    with pytest.warns(seht.PenaltyWarning, match="within the warm-up of 500"):
        train(500)
