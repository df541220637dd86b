"""``python -m qlangevin`` is ``qlangevin``; `torchrun` starts modules in this way."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
