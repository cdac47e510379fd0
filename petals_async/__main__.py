"""`python -m petals_async`: the same as the command `petals-async`."""

from __future__ import annotations

from petals_async.cli.main import main

if __name__ == "__main__":
    main()
