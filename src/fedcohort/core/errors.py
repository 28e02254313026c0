"""Every error fedcohort raises: one base class, each also the built-in it resembles.

A message names the thing, its value, what is allowed and what to do about it.
"""

from __future__ import annotations


class FedcohortError(Exception):
    """Base of all errors raised on purpose by fedcohort.

    Parameters
    ----------
    message : str
        What was wrong, with which value, and what is allowed.
    hint : str, optional
        What to do about it; the command line prints it on a line of its own.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


class ParameterError(FedcohortError, ValueError):
    """A hyper-parameter is of the wrong type or out of its range."""


class InputError(FedcohortError, ValueError):
    """Data handed to fedcohort (sizes, labels, losses, a request, a report) is not usable."""


class CiphertextError(InputError):
    """Encrypted label counts, or products of them, are truncated, oversize, of another key, or not what they say."""


class BudgetError(FedcohortError, PermissionError):
    """A client's privacy budget does not cover another release."""

    __str__ = FedcohortError.__str__


class KeyHolderError(FedcohortError, ConnectionError):
    """The key holder cannot be reached, or refuses."""

    __str__ = FedcohortError.__str__


class UnknownNameError(FedcohortError, KeyError):
    """A selector, client, dataset, model or key of that name does not exist."""

    __str__ = FedcohortError.__str__  # KeyError would print the repr


class RegistryError(FedcohortError, ImportError):
    """A registry was asked while the package that fills it is still being imported."""


class SignalError(FedcohortError, LookupError):
    """A signal was read that nobody declared, or required from a host that cannot supply it."""


class SelectorError(FedcohortError, RuntimeError):
    """A selector broke the protocol: a cohort that is too large, repeats a client or names one nobody offered."""


class TicketError(FedcohortError, LookupError):
    """A report names a ticket that was never given out."""


class DuplicateReportError(TicketError):
    """A report for something that was reported already; nothing was changed."""


class JournalError(FedcohortError, OSError):
    """The journal file is damaged, from another version, in use, or cannot be written."""

    __str__ = FedcohortError.__str__


class DataError(FedcohortError, OSError):
    """A dataset is missing, truncated or not what its name says."""

    __str__ = FedcohortError.__str__


class ScenarioError(FedcohortError, ValueError):
    """A partition, latency or availability that cannot be had; the message says which constraint fails."""


class MissingExtraError(FedcohortError, ImportError):
    """A feature needs an optional dependency that is not installed."""


class DeviceError(FedcohortError, RuntimeError):
    """The device asked for is not there."""


class OtherEngineError(FedcohortError, RuntimeError):
    """An experiment would go on with another engine than the one that made its rounds so far."""
