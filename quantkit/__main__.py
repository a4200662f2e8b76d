"""The command ``quantkit``, and ``python -m quantkit``."""

from __future__ import annotations

import sys

from quantkit.process import interruptible, note_interrupts, open_descriptors


def main() -> None:
    """Run the command line; Ctrl-C ends it with one line, even while it is still being imported."""
    open_descriptors()
    note_interrupts()
    try:
        with interruptible():
            from quantkit.cli import main as run

            run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
