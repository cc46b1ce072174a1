"""`python -m maxsim` is the command `maxsim`."""

from .cli import main

if __name__ == "__main__":
    main()
