"""Errors of a model, a loss or a metric, which may be the user's own code, told apart from errors of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fedcohort.core.errors import InputError
from fedcohort.core.text import error_text


class OwnCodeError(InputError, RuntimeError):
    """A model, a loss or a metric raised an error, which is the cause, or returned something that cannot be used."""


@contextlib.contextmanager
def own_code() -> Iterator[None]:
    """Turn whatever a model, a loss or a metric raises into an :class:`OwnCodeError`."""
    try:
        yield
    except OwnCodeError:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything, and may call sys.exit
        import torch  # whoever has a model has it already

        if isinstance(error, torch.OutOfMemoryError):  # the engine tries again with fewer models at once
            raise
        raise OwnCodeError(f"The model, the loss or the metric raised an error: {error_text(error)}.") from error
