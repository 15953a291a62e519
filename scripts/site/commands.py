"""The reference of the commands: what ``--help`` prints, as a page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SOURCE = str(Path(__file__).parents[2] / "src")

INTRODUCTION = """\
# Commands

What `seht COMMAND --help` prints. Exit codes: 0; 1 where the answer is "no" (a check that is not passed); 2 for a mistake in the call,
which is said in one line. A command that misses an extra names it: `pip install 'seht[lab]'`.
"""


def commands_page() -> str:
    """Markdown."""
    if SOURCE not in sys.path:
        sys.path.insert(0, SOURCE)
    from seht.cli import build_parser

    parser = build_parser()
    [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    parts = [INTRODUCTION]
    for name, command in commands.choices.items():
        parts.append(f"## `seht {name}`\n\n```text\n{command.format_help().rstrip()}\n```\n")
    return "\n".join(parts)
