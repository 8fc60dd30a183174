"""`python -m tilerec.compat.torchrec [-m] PROGRAM ARGS`: run a program on stand-ins of TorchRec."""

import sys

from tilerec.compat.standins.run import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
