"""Class balance without collecting labels: encryption, rotation and noise.

Clients use :class:`LabelSeal`, :class:`SecretRotation`, or :class:`Ledger` and noise. The server uses
:class:`EncryptedLabels`, :class:`RotatedLabels` or :class:`NoisyLabels`, and :class:`RemoteKeyHolder` to reach a
:class:`KeyHolder`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedcohort.privacy.keyholder import KeyHolder
    from fedcohort.privacy.label_decoders import (
        ClientRefusedError,
        EncryptedLabels,
        LabelDecoder,
        NoisyLabels,
        RotatedLabels,
    )
    from fedcohort.privacy.ledger import Ledger
    from fedcohort.privacy.noise import CountNoise, GaussianNoise, GeometricNoise, LossNoise
    from fedcohort.privacy.rotation import SecretRotation
    from fedcohort.privacy.scheme import ClientKey, LabelSeal, PublicKey, make_keys
    from fedcohort.privacy.service import KeyHolderServer, RemoteKeyHolder

__all__ = [
    "ClientKey",
    "ClientRefusedError",
    "CountNoise",
    "EncryptedLabels",
    "GaussianNoise",
    "GeometricNoise",
    "KeyHolder",
    "KeyHolderServer",
    "LabelDecoder",
    "LabelSeal",
    "Ledger",
    "LossNoise",
    "NoisyLabels",
    "PublicKey",
    "RemoteKeyHolder",
    "RotatedLabels",
    "SecretRotation",
    "make_keys",
]
# Imported on demand: a client does not need the server's modules, and a simulation needs neither's.
_HOMES = {
    "keyholder": ("KeyHolder",),
    "ledger": ("Ledger",),
    "noise": ("CountNoise", "GaussianNoise", "GeometricNoise", "LossNoise"),
    "label_decoders": ("ClientRefusedError", "EncryptedLabels", "LabelDecoder", "NoisyLabels", "RotatedLabels"),
    "rotation": ("SecretRotation",),
    "scheme": ("ClientKey", "LabelSeal", "PublicKey", "make_keys"),
    "service": ("KeyHolderServer", "RemoteKeyHolder"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
