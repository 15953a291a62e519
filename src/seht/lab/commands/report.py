"""``seht report DIR``."""

from __future__ import annotations

import argparse
from typing import Any

from seht.commands.options import add_options
from seht.extras import need
from seht.lab.commands.arguments import POWER

REPORT = """\
Write table.md, table.csv and the self-contained page report.html into a comparison's directory, and
print the table. Also works while a comparison is running: what is not done yet is listed as such.
"""


def add_report(commands: Any) -> None:
    """``seht report DIR``."""
    parser = commands.add_parser(
        "report", help="the table and the page of a comparison", description=REPORT
    )
    add_options(parser, ("directory DIR", "what `seht compare --out` was given"), POWER)
    parser.set_defaults(run=run_report, extra="lab")


def run_report(arguments: argparse.Namespace) -> int:
    """Write the files, print the table and where the page is."""
    need("lab", "seht report", "jinja2", "matplotlib", "rich", "scipy")
    from seht.lab import report

    files = report.write(arguments.directory, arguments.power)
    report.show(arguments.directory, arguments.power)
    print(files["report.html"])
    return 0
