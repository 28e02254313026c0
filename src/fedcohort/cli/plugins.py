"""Commands that other installed packages add, through entry points in the group ``fedcohort.commands``."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from fedcohort.core.errors import FedcohortError, MissingExtraError
from fedcohort.core.text import error_text

# What people may type because our documentation shows it.
_OF_BENCH = ("bench", "reproduce", "diagnose", "privacy-audit", "vectors")


class RootGroup(TyperGroup):
    """Our own commands, then those of other packages. Nothing of a package is imported before its command runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names for ``--help``."""
        self._find_plugins()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None if there is none of that name."""
        if cmd_name not in self.commands:
            # Entry points are read from disk, and most calls are of our own commands.
            self._find_plugins()
        if cmd_name in _OF_BENCH and cmd_name not in self.commands:
            raise MissingExtraError(
                f"`fedcohort {cmd_name}` is in the package fedcohort-bench, which is not installed.",
                hint="pip install fedcohort-bench",
            )
        return super().get_command(ctx, cmd_name)

    def _find_plugins(self) -> None:
        for entry in sorted(importlib.metadata.entry_points(group="fedcohort.commands")):
            # setdefault: no package replaces a command of ours.
            self.commands.setdefault(entry.name, _Plugin(entry))


class _Plugin(TyperCommand):
    """Stands in for a package's command in ``--help``, and imports it when it is called."""

    def __init__(self, entry: EntryPoint) -> None:
        self.entry = entry
        self.package = entry.value if entry.dist is None else entry.dist.name
        super().__init__(
            entry.name, help=f"A command of the package {self.package}.", rich_help_panel="Other installed packages"
        )

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments of the command itself."""
        return self.load().make_context(info_name, args, parent=parent, **extra)

    def load(self) -> Any:
        """Import the command."""
        try:
            command = self.entry.load()
        except Exception as error:
            raise FedcohortError(
                f"The command {self.entry.name!r} of the package {self.package} cannot be imported: "
                f"{error_text(error)}.",
                hint=f"update or remove {self.package}",
            ) from error
        if not isinstance(command, typer.Typer):
            function, command = command, typer.Typer(rich_markup_mode="markdown", add_completion=False)
            command.command(self.entry.name)(function)
        return typer.main.get_command(command)
