"""``seht doctor module:function``."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from typing import Any

from seht.commands.files import ReportFiles
from seht.commands.options import SEED, add_options, real, whole
from seht.commands.targets import call_example
from seht.errors import UsageError, one_line

DOCTOR = """\
Look at your own model before you train it with the penalty: is the gradient right, which curvature
and which boundary, what does each form cost here, which weight is how strong, does the model
memorise (expect a gain) or underfit (do not use it)? At the end, the two lines to paste.
"""
DOCTOR_EPILOG = """\
the function returns the model, the loss function, the training data and, if you have them,
held-out data (a batch, a data set or a loader each); what `seht check` takes will do:

  # train.py
  def example():
      model = Net().train()           # better a trained one: only that can show memorising
      return model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), train, valid

  seht doctor train:example
  seht doctor train:example --html doctor.html --json doctor.json --budget 60

It works on a copy; nothing of yours is changed. Exit code 0: the penalty can be used as the last
two lines say; 1: its gradient cannot be trusted, or there is nothing to penalise; 2: a mistake in
the call.
"""


def add_doctor(commands: Any) -> None:
    """``seht doctor module:function``."""
    text = "what to expect of the penalty on your model, and the two lines to write"
    parser = commands.add_parser("doctor", help=text, description=DOCTOR, epilog=DOCTOR_EPILOG)
    brings = "returns (model, loss_fn, data) or (model, loss_fn, data, held_out)"
    add_options(
        parser,
        ("target module:function", brings),
        ("--budget SECONDS", "about how long it may take (default 120)", real(5.0), 120.0),
        ("--seed N", "seed of the probes (default 0)", whole(0, SEED), 0),
        ("--json FILE", "every figure as JSON; - for standard output"),
        ("--html FILE", "a self-contained page"),
    )
    parser.set_defaults(run=run_doctor, extra="measure")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Load what the function returns, look at it, report."""
    files = ReportFiles(arguments.json, arguments.html)
    given = call_example(arguments.target)
    import seht
    from seht.doctor import page

    try:
        report = seht.doctor(
            *given,
            seed=arguments.seed,
            budget=arguments.budget,
            progress=sys.stderr.isatty(),
        )
        command = shlex.join(["seht", *arguments.argv])
        files.write(report, report.as_dict(), partial(page.render, report, command))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(one_line(error)) from error
    return 0 if report.ok else 1
