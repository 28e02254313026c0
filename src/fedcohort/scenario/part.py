"""The base class of the parts of a scenario that have a name: partitions, latencies, availabilities, devices."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from fedcohort.core.params import Parameterized


class NamedPart(Parameterized):
    """A part of a scenario, registered under a name."""

    name: ClassVar[str]

    def describe(self) -> str:
        """Return the name and the parameters on one line, with long values shortened."""
        values = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every Parameterized is a dataclass
            text = repr(getattr(self, field.name))
            values.append(f"{field.name}={text if len(text) <= 60 else text[:57] + '...'}")
        return f"{self.name}({', '.join(values)})"
