"""`python -m kvbench` is the command `kvbench`."""

import sys

from kvbench.cli.main import main

sys.exit(main())
