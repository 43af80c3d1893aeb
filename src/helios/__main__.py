"""``python -m helios`` is ``helios``."""

from helios.cli import main

main()
