"""Entry point of `tilerec` and `python -m tilerec`: the command line."""

import sys


def main() -> None:
    """Run the command line; without its packages, print the extra that installs them."""
    try:
        from tilerec.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit(f"error: tilerec: got no package {error.name}; expected it installed. Run pip install 'tilerec[cli]'.")
    run()


if __name__ == "__main__":
    main()
