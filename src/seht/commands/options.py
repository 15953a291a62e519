"""The options of a command as a table whose rows read like the lines of its help."""

from __future__ import annotations

from typing import Any


def add_command(
    commands: Any, name: str, text: str, about: str, epilog: str | None = None, **more: Any
) -> Any:
    """The parser of a new command: its line in the list of commands, and its own help."""
    return commands.add_parser(name, help=text, description=about, epilog=epilog, **more)


def add_options(parser: Any, *rows: tuple[Any, ...]) -> None:
    """Add ``(spelling, help, type, default)`` of each row; the last two may be left out.

    ``"--seed N"`` takes a value, ``"--model NAME ..."`` may be repeated, ``"--engine {a,b}"`` takes
    one of these, ``"--fast"`` is a switch, and ``"target FILE"`` an argument without a dash.
    """
    for spelling, text, *rest in rows:
        name, _, value = spelling.partition(" ")
        if not value:
            parser.add_argument(name, action="store_true", help=text)
            continue
        how: dict[str, Any] = dict(zip(("type", "default"), rest, strict=False))
        if value.startswith("{"):
            how["choices"] = value.strip("{}").split(",")
        else:
            how["metavar"] = value.removesuffix(" ...")
        if value.endswith(" ..."):
            how["action"] = "append"
        parser.add_argument(name, help=text, **how)
