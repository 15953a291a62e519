"""Text: streams and stretches against the definition, vocabularies, and the real corpora."""

import pytest
import torch
from real_data import needs

from seht.lab.config import DataConfig, ModelConfig, OptimConfig, Recipe
from seht.lab.data import DataError, load, text
from seht.lab.recipes import recipe


def of(name="pydocs", batch=4, eval_batch=3, **data):
    config = DataConfig(name, **data)
    return Recipe("test", config, ModelConfig("lstm"), OptimConfig(1.0), batch, 1, eval_batch)


def a_text(count, **options):
    """A text that counts, as every split."""
    tokens = torch.arange(count)
    corpus = text.Corpus(
        tuple(map(str, range(count))), dict.fromkeys(("train", "valid", "test"), tokens)
    )
    return text.Text(corpus, of(**options), "cpu")


def test_batches_are_contiguous_and_predict_the_next_word():
    data = a_text(50, batch=4, bptt=5)  # streams of 12, so 11 predictions: 5, 5 and 1
    batches = list(data.train_batches(0))
    assert [tuple(b.x.shape) for b in batches] == [(5, 4), (5, 4), (1, 4)]
    assert data.steps_per_epoch == 3 and data.classes == 50 and data.example is None
    assert all(torch.equal(b.y, b.x + 1) for b in batches)
    whole = torch.cat([b.x for b in batches])
    for stream in range(4):
        assert whole[:, stream].tolist() == list(range(12 * stream, 12 * stream + 11))


def test_every_epoch_is_the_same_and_can_be_entered_in_the_middle():
    data = a_text(50, batch=4, bptt=5)
    whole, other, rest = (list(data.train_batches(*a)) for a in ((0,), (1,), (2, 1)))
    assert all(torch.equal(a.x, b.x) for a, b in zip(whole, other, strict=True))
    assert all(torch.equal(a.y, b.y) for a, b in zip(whole[1:], rest, strict=True))


@pytest.mark.parametrize("count", range(8, 40))
@pytest.mark.parametrize("bptt", [1, 3, 7])
def test_steps_per_epoch_is_the_number_of_batches(count, bptt):
    data = a_text(count, batch=4, bptt=bptt)
    batches = list(data.train_batches(0))
    assert len(batches) == data.steps_per_epoch
    assert sum(b.y.numel() for b in batches) == 4 * (count // 4 - 1)


def test_evaluation_has_streams_of_its_own_and_a_limit():
    data = a_text(100, batch=4, eval_batch=10, bptt=4)
    assert [tuple(b.x.shape) for b in data.eval_batches("valid")] == [(4, 10), (4, 10), (1, 10)]
    assert len(list(data.eval_batches("test", limit=40))) == 1
    assert len(list(data.eval_batches("test", limit=41))) == 2


def test_too_little_text():
    with pytest.raises(DataError, match="7 tokens are too few for 4 streams"):
        a_text(7, batch=4)


def test_vocabulary():
    texts = {
        "train": ["a", "b", "a", "c", "a", "b", "d", "<eos>"],
        "valid": ["a", "e", "<eos>"],
        "test": ["d"],
    }
    full = text.encode(texts, None)
    assert full.words == ("a", "b", "c", "d", "<eos>", "<unk>")
    assert [full.words[i] for i in full.tokens["train"]] == texts["train"]
    assert [full.words[i] for i in full.tokens["valid"]] == ["a", "<unk>", "<eos>"]
    few = text.encode(texts, 3)
    assert few.words == ("a", "b", "<unk>")
    shown = " ".join(few.words[i] for i in few.tokens["train"])
    assert shown == "a b a <unk> a b <unk> <unk>"
    assert [few.words[i] for i in few.tokens["test"]] == ["<unk>"]
    assert len(text.encode(texts, 1000).words) == 6


def test_wikitext_lines(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(" \n = Tïtle = \n\n One , two . \n", encoding="utf-8")
    assert " ".join(text.words(path)) == "<eos> = Tïtle = <eos> <eos> One , two . <eos>"


def test_pydocs():
    data = load(of(bptt=10, vocabulary=500), 0)
    assert data.classes == 500
    texts = text.pydocs()
    sizes = {split: len(words) for split, words in texts.items()}
    assert sizes["train"] > 50_000 and min(sizes["valid"], sizes["test"]) > 4_000
    sets = {k: set(" ".join(v).split(" <eos> ")) for k, v in texts.items()}
    for a, b in (("train", "valid"), ("train", "test"), ("valid", "test")):
        shared = sets[a] & sets[b]
        assert not {p for p in shared if not p.endswith("<eos>")}  # no paragraph is in two splits
    assert texts == text.pydocs()


def test_sizes_of_texts():
    small = text.corpus(DataConfig("pydocs", size=1000, validation=300))
    assert {k: len(v) for k, v in small.tokens.items()} == {
        "train": 1000,
        "valid": 300,
        "test": 300,
    }
    assert text.pydocs()["train"][:1000] == [small.words[i] for i in small.tokens["train"]]
    with pytest.raises(
        DataError, match=r"pydocs has \d+ tokens to train on: data.size .* lower it"
    ):
        load(of(size=10**7), 0)


@needs("wikitext2")
def test_real_wikitext2():
    """The published numbers of tokens and types."""
    corpus = text.corpus(recipe("wikitext2-lstm").data)
    counts = {k: len(v) for k, v in corpus.tokens.items()}
    assert counts == {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    assert len(corpus.words) == 33_278
    data = load(recipe("wikitext2-lstm"), 0)
    assert data.steps_per_epoch == 2984 and data.classes == 33_278
    batch = next(iter(data.train_batches(0)))
    assert batch.x.shape == (35, 20)
    start = [corpus.words[i] for i in batch.x[:9, 0]]
    assert start == ["<eos>", "=", "Valkyria", "Chronicles", "III", "=", "<eos>", "<eos>", "Senjō"]
    assert [tuple(b.x.shape) for b in data.eval_batches("test", limit=1)] == [(35, 10)]
