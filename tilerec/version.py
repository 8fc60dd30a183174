"""`__version__`, read on first use: `importlib.metadata` takes a tenth of the time of a help text."""

from importlib import metadata

__version__ = next((found.version for found in metadata.distributions(name="tilerec")), "0+unknown")
"""The version; "0+unknown" where tilerec is not installed."""
