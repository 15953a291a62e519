"""The head of a language model or classifier: the module that puts out the logits.

A Hugging Face model that is given labels puts out its own loss, in which the loss is linear: the
boundary of the Gauss-Newton matrix is then its head, ``boundary=find_head(model)``.
"""

from __future__ import annotations

from torch import nn

from seht.probes import clean_name

_NAMES = ("classifier", "score", "qa_outputs")
"""What Hugging Face calls the heads that no method gives: of sequences, tokens, images, spans."""


def find_head(model: nn.Module) -> str | None:
    """The name of the module that puts out the logits, for ``boundary=``; ``None`` if unknown.

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
