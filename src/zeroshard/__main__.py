"""The `zeroshard` command, also as `python -m zeroshard`."""

from __future__ import annotations

import sys

from zeroshard.interrupts import end_at_once

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process; its exit status."""
    end_at_once("zeroshard")
    from zeroshard.launch import cli  # a Ctrl-C while it is imported is one line, too

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
