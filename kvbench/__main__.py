"""`python -m kvbench` is the command `kvbench`."""

import sys

from kvbench.cli.main import main

if __name__ == "__main__":  # worker processes import this module too
    sys.exit(main())
