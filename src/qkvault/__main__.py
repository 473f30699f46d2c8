"""``python -m qkvault`` is the command ``qkvault``."""

from __future__ import annotations

from qkvault.cli.app import main

if __name__ == "__main__":
    main()
