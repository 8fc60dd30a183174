"""The stand-ins of this process; importing this module installs them."""

from tilerec.compat.standins.session import install

session = install()
