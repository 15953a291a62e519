"""The command; ``--help`` says what it takes."""

import argparse
import sys
from pathlib import Path


def main(arguments=None):
    from measuring import __doc__ as about
    from measuring.command import Command

    parser = argparse.ArgumentParser(prog="measuring", description=about.splitlines()[0])
    add = parser.add_argument
    add("--model", action="append", metavar="NAME", help="resnet18 or gpt (may be repeated)")
    add("--fast", action="store_true", help="some two minutes, not half an hour")
    add("--products", type=int, metavar="N", help="of the Hessian, for each of the others")
    add("--data-dir", metavar="DIR", help="where the data is")
    add("--json", metavar="FILE", help="write every figure as JSON")
    add("--out", metavar="FILE", help="write the Markdown there, too")
    given = parser.parse_args(arguments)
    try:
        command = Command(
            given.model, given.fast, given.products, given.json, given.out, given.data_dir
        )
    except ValueError as error:
        parser.error(str(error))
    command.run()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # a folder is run as a script with its inside
    main()
