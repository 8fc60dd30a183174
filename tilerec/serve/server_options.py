"""`ServerOptions`: the settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilerec.errors import ConfigError
from tilerec.serve.batching import Batching
from tilerec.serve.request_log import LogOptions


@dataclass(frozen=True)
class ServerOptions:
    """Settings of a server.

    Attributes:
        path: of the package; replace the file to serve another version.
        deltas: folder of a log of published states that the weights follow; "" for none.
        host, port: to listen on; port 0: a free one.
        workers: processes. Each batches its own requests.
        threads: of torch in each worker. One is best for the latency of small requests.
        every: seconds between two looks at the file and the log; 0 for none.
        rows_per_second: most rows of published states that each worker writes in a second; 0 for no limit.
        grace: seconds that running requests have at the end.
        log: of requests.
    """

    path: str
    deltas: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    threads: int = 1
    every: float = 1.0
    rows_per_second: float = 2e6
    grace: int = 30
    batching: Batching = field(default_factory=Batching)
    log: LogOptions = field(default_factory=LogOptions)

    def __post_init__(self) -> None:
        rows = self.rows_per_second
        checks = {
            "host": (self.host != "", "an address, 0.0.0.0 for all of this machine"),  # "" would be all of them, too
            "port": (0 <= self.port < 1 << 16, "0 to 65535"),
            "workers": (self.workers >= 1, "at least 1"),
            "threads": (self.threads >= 1, "at least 1"),
            "every": (self.every >= 0, "seconds from 0"),  # nan is not
            "grace": (self.grace >= 0, "seconds from 0"),
            "rows_per_second": (rows == 0 or rows >= 50, "at least 50, or 0 for no limit"),
        }
        for name, (fits, expected) in checks.items():
            if not fits:
                raise ConfigError(f"serve: got {name}={getattr(self, name)!r}; expected {expected}. Correct it.")
