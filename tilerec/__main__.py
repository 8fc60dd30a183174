"""Entry point of `python -m tilerec`: the command line."""

from tilerec.cli import main

if __name__ == "__main__":
    main()
