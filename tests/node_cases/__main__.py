"""The command `python -m tests.node_cases`."""

import sys

from tests.node_cases.run import main

if __name__ == "__main__":
    sys.exit(main())
