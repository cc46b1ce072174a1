"""`python -m maxsim` is the command `maxsim`, whose entry this is."""

import os
import signal
from typing import NoReturn


def _stop(*_: object) -> NoReturn:
    os.write(2, b"maxsim: stopped\n")
    os._exit(130)


def main() -> None:
    """Runs the command. Ctrl-C ends it at once: an exception would come out of half-loaded libraries as pages of
    tracebacks. Commands that have something to end in order take the signal over."""
    signal.signal(signal.SIGINT, _stop)
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
