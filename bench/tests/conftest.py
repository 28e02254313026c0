"""Shared by the tests of this package."""

from tests.cli.conftest import command

__all__ = ["command"]
