"""`python -m loadtest.chaos`: the same as `python -m loadtest chaos`.

`--check FILE` checks a recorded history again.
"""

from __future__ import annotations

import sys

from loadtest.chaos.run import main

if __name__ == "__main__":
    sys.exit(main())
