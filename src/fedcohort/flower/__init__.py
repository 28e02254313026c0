"""Selection on a live Flower federation: the same selectors, the same cohorts, on other people's machines.

:class:`CohortStrategy` wraps any Flower strategy and decides who takes part; :func:`cohort_client` gives a ClientApp
the answers a selector may ask for. Both sides work with Flower's message API (flwr 1.41).
"""

from fedcohort.errors import MissingExtraError

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        "fedcohort.flower needs Flower, which is not installed.", hint="pip install 'fedcohort[flower]'"
    ) from error

from fedcohort.flower.client import Answers, Facts, client_name, cohort_client
from fedcohort.flower.failures import Failure, failures
from fedcohort.flower.strategy import CohortStrategy, FederationTimeoutError, ServerValidation

__all__ = [
    "Answers",
    "CohortStrategy",
    "Facts",
    "Failure",
    "FederationTimeoutError",
    "ServerValidation",
    "client_name",
    "cohort_client",
    "failures",
]
