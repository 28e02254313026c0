"""Define the errors that fedcohort raises. Each derives from one base class and from the built-in it resembles.

A message names the thing, its value, what is allowed and what to do about it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class FedcohortError(Exception):
    """Base class of all errors that fedcohort raises on purpose.

    Parameters
    ----------
    message : str
        What is wrong, the offending value, and what is allowed.
    hint : str, optional
        What to do about it; the command line prints it on a separate line.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


class ParameterError(FedcohortError, ValueError):
    """A parameter has the wrong type or is out of range."""


class InputError(FedcohortError, ValueError):
    """Data passed to fedcohort (sizes, labels, losses, a request, a report) cannot be used."""


class CiphertextError(InputError):
    """Encrypted label counts, or products of them, are truncated, too large, under another key, or inconsistent."""


class BudgetError(FedcohortError, PermissionError):
    """A client's privacy budget does not cover another release."""

    __str__ = FedcohortError.__str__


class KeyHolderError(FedcohortError, ConnectionError):
    """The key holder cannot be reached, or refuses the request."""

    __str__ = FedcohortError.__str__


class UnknownNameError(FedcohortError, KeyError):
    """A selector, client, dataset, model or key of that name does not exist."""

    __str__ = FedcohortError.__str__  # KeyError would print the repr


class RegistryError(FedcohortError, ImportError):
    """A registry was used before the package that fills it had been imported completely."""


class SignalError(FedcohortError, LookupError):
    """A signal was read without being declared, or required from a host that cannot supply it."""


class SelectorError(FedcohortError, RuntimeError):
    """A selector raised an error, which is the cause, or returned something that breaks the protocol."""


class TicketError(FedcohortError, LookupError):
    """A report names a ticket that was never issued."""


class DuplicateReportError(TicketError):
    """A report repeats one that was already accepted; nothing was changed."""


class JournalError(FedcohortError, OSError):
    """The journal file is damaged, from another version, in use, or cannot be written."""

    __str__ = FedcohortError.__str__


class DataError(FedcohortError, OSError):
    """A dataset is missing, truncated, or not the one its name promises."""

    __str__ = FedcohortError.__str__


class ScenarioError(FedcohortError, ValueError):
    """A scenario cannot be built as requested; the message says which constraint fails."""


class MissingExtraError(FedcohortError, ImportError):
    """A feature needs an optional dependency that is not installed."""


@contextlib.contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import into an error that says ``what`` needs the extra and how to install it.

    >>> with needs_extra("Data frames need pandas.", "notebook"):
    ...     import no_such_package
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.MissingExtraError: Data frames need pandas.
      hint: pip install 'fedcohort[notebook]'
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(what, hint=f"pip install 'fedcohort[{extra}]'") from error


class DeviceError(FedcohortError, RuntimeError):
    """The requested device does not exist."""


class OtherEngineError(FedcohortError, RuntimeError):
    """An experiment would continue on another kind of engine than the one that ran its earlier rounds."""
