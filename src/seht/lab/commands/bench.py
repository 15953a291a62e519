"""``seht bench``."""

from __future__ import annotations

import argparse
from typing import Any

from seht.commands.options import COUNT, add_options, whole
from seht.errors import UsageError

BENCH = """\
Time, peak memory, error and variance of every estimator and engine beside a plain training step and
its rivals, on a ResNet-18, a Wide ResNet, an LSTM, a GPT and an MLP. Prints a Markdown report;
progress goes to standard error. Leave the machine alone while it runs.
"""


def add_bench(commands: Any) -> None:
    """``seht bench``."""
    text = "what each estimator costs, and how exact it is"
    parser = commands.add_parser("bench", help=text, description=BENCH)
    names = (
        "one of resnet18, resnet18-group, wrn, lstm, gpt, mlp, gpt-large-vocabulary, "
        "gpt-large-vocabulary-lora (may be repeated)"
    )
    earlier = "a file of an earlier --json: its models go into the report and are not measured"
    add_options(
        parser,
        ("--model NAME ...", names),
        ("--fast", "under five minutes, not an hour"),
        ("--repeats N", "rounds of timing", whole(1, COUNT)),
        ("--json FILE", "write every figure as JSON"),
        ("--plot FILE", "plot cost against variance (.png, .svg)"),
        ("--out FILE", "write the Markdown there, too"),
        ("--join FILE ...", f"{earlier} again (may be repeated)", str, []),
    )
    parser.set_defaults(run=run_bench, extra="lab")


def run_bench(arguments: argparse.Namespace) -> int:
    """Measure and report."""
    from seht.lab.bench.command import Command

    try:
        names = ("model", "fast", "repeats", "json", "plot", "out", "join")
        command = Command(*(getattr(arguments, name) for name in names))
    except ValueError as error:
        raise UsageError(str(error)) from error
    command.run()
    return 0
