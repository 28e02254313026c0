"""Class balance without anybody's labels leaving them: encryption, rotation, noise, estimates, attacks, audits.

What clients need (:class:`PublicKey`, :class:`SecretRotation`, :class:`Ledger` and the noise), what a server needs
(:class:`EncryptedLabels`, :class:`RotatedLabels`, :class:`NoisyLabels`, :class:`RemoteKeyHolder`), what a key holder is
(:class:`KeyHolder`), and what there is to doubt: :func:`audit` and :func:`verify`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcohort.privacy.audited import verify
    from fedcohort.privacy.keyholder import ClientRefusedError, KeyHolder
    from fedcohort.privacy.ledger import Ledger
    from fedcohort.privacy.meter import audit
    from fedcohort.privacy.noise import CountNoise, LossNoise
    from fedcohort.privacy.openers import EncryptedLabels, LabelOpener, NoisyLabels, RotatedLabels
    from fedcohort.privacy.rotation import SecretRotation
    from fedcohort.privacy.scheme import EvaluationKey, PublicKey, make_keys
    from fedcohort.privacy.service import KeyHolderServer, RemoteKeyHolder

__all__ = [
    "ClientRefusedError",
    "CountNoise",
    "EncryptedLabels",
    "EvaluationKey",
    "KeyHolder",
    "KeyHolderServer",
    "LabelOpener",
    "Ledger",
    "LossNoise",
    "NoisyLabels",
    "PublicKey",
    "RemoteKeyHolder",
    "RotatedLabels",
    "SecretRotation",
    "audit",
    "make_keys",
    "verify",
]
# A client needs none of the server's modules, and a simulation none of either.
_HOMES = {
    "audited": ("verify",),
    "keyholder": ("ClientRefusedError", "KeyHolder"),
    "ledger": ("Ledger",),
    "meter": ("audit",),
    "noise": ("CountNoise", "LossNoise"),
    "openers": ("EncryptedLabels", "LabelOpener", "NoisyLabels", "RotatedLabels"),
    "rotation": ("SecretRotation",),
    "scheme": ("EvaluationKey", "PublicKey", "make_keys"),
    "service": ("KeyHolderServer", "RemoteKeyHolder"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
