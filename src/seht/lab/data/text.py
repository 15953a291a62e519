"""Text in memory: words as numbers, in parallel streams, cut into contiguous stretches."""

from __future__ import annotations

import functools
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from seht.lab.config import DataConfig, Recipe
from seht.lab.data import files
from seht.lab.data.files import DataError
from seht.lab.methods.base import Batch

END, UNKNOWN = "<eos>", "<unk>"
BLOCK = 10  # paragraphs of pydocs in a row that stay together


@dataclass(frozen=True)
class Corpus:
    """Three texts as numbers, and the words that the numbers stand for."""

    words: tuple[str, ...]
    tokens: dict[str, Tensor]


class Text:
    """One run's text. A batch is a stretch of ``bptt`` tokens of every stream, and the next batch
    goes on where it ended; nothing here is random.
    """

    example: tuple[int, ...] | None = None

    def __init__(self, corpus: Corpus, recipe: Recipe, device: str) -> None:
        self._streams = {
            split: streams(tokens, recipe.eval_batch).to(device)
            for split, tokens in corpus.tokens.items()
        }
        self._training = streams(corpus.tokens["train"], recipe.batch).to(device)
        self._bptt = self.context = recipe.data.bptt
        self.classes = len(corpus.words)
        self.wrong: dict[str, float] = {}
        self.steps_per_epoch = math.ceil((len(self._training) - 1) / self._bptt)

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The text from its beginning, or from step `start` on."""
        return self._stretches(self._training, start)

    def eval_batches(self, split: str, limit: int | None = None) -> Iterator[Batch]:
        """A split as ``eval_batch`` streams; it ends with the stretch that reaches `limit`
        predicted tokens.
        """
        seen = 0
        for batch in self._stretches(self._streams[split], 0):
            if limit is not None and seen >= limit:
                return
            seen += batch.y.numel()
            yield batch

    def _stretches(self, text: Tensor, start: int) -> Iterator[Batch]:
        for first in range(start * self._bptt, len(text) - 1, self._bptt):
            last = min(first + self._bptt, len(text) - 1)
            yield Batch(text[first:last], text[first + 1 : last + 1])


def streams(tokens: Tensor, count: int) -> Tensor:
    """Side by side ``(time, count)``; what is left over at the end is dropped."""
    time = len(tokens) // count
    if time < 2:
        raise DataError(
            f"{len(tokens)} tokens are too few for {count} streams; lower batch and eval_batch"
        )
    return tokens[: time * count].view(count, time).t().contiguous()


# --- the texts --------------------------------------------------------------------------------


def corpus(config: DataConfig, data_dir: str | os.PathLike[str] | None = None) -> Corpus:
    """A text with the recipe's vocabulary, read once per process."""
    cut = (config.size, config.validation or None)
    return _corpus(config.name, *cut, config.vocabulary, *files.places_of(data_dir))


@functools.lru_cache(maxsize=1)
def _corpus(
    name: str,
    size: int | None,
    validation: int | None,
    vocabulary: int | None,
    data_dir: str | None,
    _named: str | None,
) -> Corpus:
    if name == "pydocs":
        texts = pydocs()
    else:
        texts = {split: words(path) for split, path in files.find(name, data_dir).items()}
    if size is not None and size > len(texts["train"]):
        raise DataError(
            f"{name} has {len(texts['train'])} tokens to train on: data.size ({size}) is more; "
            "lower it"
        )
    kept = {k: text[: size if k == "train" else validation] for k, text in texts.items()}
    return encode(kept, vocabulary)


def encode(texts: dict[str, Sequence[str]], vocabulary: int | None) -> Corpus:
    """Number the words of the training text; every other one, and the rare, is ``<unk>``.

    In order of frequency, equally frequent ones as they first come.
    """
    counts = Counter(texts["train"])
    counts[UNKNOWN] += 0  # it has a number even if every word is known
    known = tuple(word for word, _ in counts.most_common(vocabulary))
    if UNKNOWN not in known:
        known = (*known[:-1], UNKNOWN)
    number = {word: i for i, word in enumerate(known)}
    rest = number[UNKNOWN]
    return Corpus(
        known,
        {
            split: torch.tensor([number.get(word, rest) for word in text])
            for split, text in texts.items()
        },
    )


def words(path: Path) -> list[str]:
    """WikiText as it comes: words between spaces, and ``<eos>`` at the end of each line."""
    with path.open(encoding="utf-8") as lines:
        return [word for line in lines for word in (*line.split(), END)]


def pydocs() -> dict[str, Sequence[str]]:
    """Python's own documentation, as ``help()`` has it; of ten blocks one is for validation and
    one for the test.

    Topics share paragraphs, so each paragraph is kept where it first occurs: none that is tested
    on has been trained on. The text belongs to the Python version that runs.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "this Python has no pydoc_data.topics; use a complete installation of Python"
        ) from error
    text = "\n\n".join(topics[name] for name in sorted(topics)).lower()
    paragraphs = (" ".join(re.findall(r"\w+|[^\w\s]", part)) for part in text.split("\n\n"))
    texts: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for i, paragraph in enumerate(dict.fromkeys(filter(None, paragraphs))):
        split = {8: "valid", 9: "test"}.get(i // BLOCK % 10, "train")
        texts[split] += [*paragraph.split(), END]
    return dict(texts)
