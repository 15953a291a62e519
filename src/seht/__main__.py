"""``python -m seht`` is the command ``seht``."""

import sys

from seht.cli import main

if __name__ == "__main__":
    sys.exit(main())
