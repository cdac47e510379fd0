"""The version of this library, from its installed metadata."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("petals-async")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
