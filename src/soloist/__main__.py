"""`python -m soloist` is `soloist`."""

from __future__ import annotations

import sys

from soloist.cli import main

if __name__ == "__main__":
    sys.exit(main())
