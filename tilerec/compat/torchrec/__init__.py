"""Run programs that import `torchrec` on tilerec, without TorchRec and FBGEMM.

    python -m tilerec.compat.torchrec train.py --epochs 2      runs a program
    import tilerec.compat.torchrec                             as the first line of a program does the same

At the end, the program prints to stderr which names were substituted, which settings had no effect, and which numbers
differ from TorchRec's. See docs/torchrec-users.md.
"""

from tilerec.compat.standins.installed import session as session
