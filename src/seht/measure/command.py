"""The command ``seht measure``: measure every model, print the table, write JSON and the page."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seht
from seht.commands.files import check_outputs
from seht.extras import need
from seht.measure import page
from seht.measure.data import is_batch, reads_once
from seht.measure.survey import Findings, Plan, Subject, survey
from seht.measure.table import terminal


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """The loss where none is given: of logits, for batches (inputs, classes)."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            "without a loss function a batch must be (inputs, classes); let the model's function "
            "return (model, loss_fn), or give --loss module:function"
        )
    logits = model(batch[0])
    logits = logits[0] if isinstance(logits, tuple) else logits
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


def subject(name: str, made: Any, data: Any, loss_fn: Any = None) -> Subject:
    """From what the user's functions returned; ``TypeError`` where that is something else."""
    model = made
    if isinstance(made, (tuple, list)) and len(made) == 2:
        model, loss_fn = made[0], loss_fn or made[1]
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{name} must return a torch.nn.Module or (model, loss_fn), not {type(made).__name__}"
        )
    if reads_once(data):
        data = list(data)  # several measurements read it
    if not is_batch(data) and not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise TypeError(
            "the data's function must return a batch, a data set or an iterable of batches, "
            f"not {type(data).__name__}"
        )
    return Subject(name, model, loss_fn or cross_entropy, data)


def run(
    subjects: Sequence[Subject],
    plan: Plan,
    *,
    command: str,
    json_file: str | None = None,
    html_file: str | None = None,
) -> list[Findings]:
    """Measure, print the table, write the files (each whole or not at all)."""
    check_outputs(json_file, html_file)
    if html_file is not None:
        need("measure", "the page", "jinja2", "matplotlib")
    if "eigenvalues" in plan.parts:
        need("measure", "eigenvalues", "scipy")  # now, not after the first model's gradient
    bar = sys.stderr.isatty()
    found = [survey(one, plan, progress=bar) for one in subjects]
    if json_file is not None:
        text = json.dumps(
            {
                "versions": dict(versions()),
                "plan": vars(plan),
                "models": [one.as_dict() for one in found],
            },
            indent=2,
            allow_nan=False,
        )
        if json_file == "-":
            print(text)
        else:
            write(json_file, text + "\n")
    if json_file != "-":
        print(terminal(found))
    if html_file is not None:
        write(html_file, page.render(found, command, versions()))
        if json_file != "-":
            print(f"\n{html_file}")
    return found


def versions() -> list[tuple[str, str]]:
    """Of what a figure may depend on."""
    return [
        ("seht", seht.__version__),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
    ]


def write(file: str, text: str) -> None:
    """All of the text under that name, or nothing."""
    part = f"{file}.part"
    try:
        Path(part).write_text(text, encoding="utf-8")
        os.replace(part, file)
    except OSError as error:
        Path(part).unlink(missing_ok=True)
        raise ValueError(f"cannot write {file!r}: {error.strerror or error}") from error
