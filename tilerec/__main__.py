"""`python -m tilerec` is the command line."""

from tilerec.cli import main

if __name__ == "__main__":
    main()
