"""The head of a language model or classifier: the module that returns the logits.

A Hugging Face model that is given labels returns its own loss. The boundary of the Gauss-Newton
matrix is then its head, ``boundary=find_head(model)``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from seht.errors import unknown
from seht.probes import clean_name

_NAMES = ("classifier", "score", "qa_outputs")
"""Hugging Face's names for heads without a method: of sequences, tokens, images, spans."""


def find_module(model: nn.Module, name: str | None) -> nn.Module:
    """The module of that name, or of the one name that ends so; wrappers aside. The model itself
    without one.
    """
    if name is None:
        return model
    wanted = clean_name(name)
    names = {clean_name(raw): module for raw, module in model.named_modules() if raw}
    names = {"": model, **names}
    if wanted in names:
        return names[wanted]
    # An adapter of PEFT is a module around the model, another inside it, and longer names.
    ends = [known for known in names if known.endswith(f".{wanted}")]
    if len(ends) == 1:
        return names[ends[0]]
    if ends:
        raise ValueError(
            f"boundary: the model has {len(ends)} modules {name!r}; give the whole name: "
            + ", ".join(map(repr, ends))
        )
    head = find_head(model)
    names.pop("")
    said = unknown("module", name, names).removeprefix("unknown module ")
    hint = "" if head is None else f"; its head is {head!r}"
    raise ValueError(
        f"boundary: the model has no module {said}{hint}; model.named_modules() lists them"
    )


def returns_loss(arguments: dict[str, Any]) -> bool:
    """Whether a Hugging Face model with these arguments returns its own loss, of one head."""
    given = [n for n, value in arguments.items() if "label" in n and value is not None]
    return given == ["labels"]


def find_head(model: nn.Module) -> str | None:
    """The name of the module that returns the logits, for ``boundary=``; ``None`` if unknown.

    It is what ``get_output_embeddings()`` returns, of the model itself or of one inside it (an
    adapter of PEFT, a LightningModule); else a module that is called ``lm_head``; else, in a
    Hugging Face model, its ``classifier``, ``score`` or ``qa_outputs``. Where two different
    modules could be meant (a teacher beside a student), neither is returned.
    """
    names = {id(module): clean_name(name) for name, module in model.named_modules()}
    hosts = [m for m in model.modules() if callable(getattr(m, "get_output_embeddings", None))]
    for found in (
        [_output_embeddings(model)],
        [_output_embeddings(host) for host in hosts],
        [getattr(module, "lm_head", None) for module in model.modules()],
        [getattr(host, name, None) for host in hosts for name in _NAMES],
    ):
        heads = {id(head) for head in found if isinstance(head, nn.Module)} & names.keys()
        if heads:
            return names[heads.pop()] if len(heads) == 1 else None
    return None


def _output_embeddings(host: nn.Module) -> nn.Module | None:
    try:
        head = host.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # as speech and vision models raise
        return None
    runs = isinstance(head, nn.Module) and not isinstance(head, (nn.ModuleList, nn.ModuleDict))
    return head if runs else None
