"""The figure of FLASH in a report: the coefficients of its score."""

from __future__ import annotations

from fedcohort.core.plots import Lines, Picture, SelectorRun, number_text

THETA = "theta "  # prefix of the notes with fitted coefficients, before the element's name


def _coefficients(record: SelectorRun) -> Lines | None:
    """Show the fitted coefficient of each context element over the rounds."""
    lines: dict[str, tuple[list[int], list[float]]] = {}
    for t, notes in record.notes:
        for key, value in notes.items():
            if key.startswith(THETA):
                rounds, values = lines.setdefault(key.removeprefix(THETA), ([], []))
                rounds.append(t)
                values.append(float(value))
    if not lines:
        return None
    last = {name: values[-1] for name, (_, values) in lines.items()}
    top = max(last, key=lambda name: abs(last[name]))
    effect = "more" if last[top] > 0 else "less"
    text = (
        f"{record.opening} the largest coefficient is that of {top}, {number_text(last[top])}: the higher a client's "
        f"{top}, the {effect} reward is expected of it."
        if last[top]
        else f"{record.opening} nothing has been learned: all coefficients are 0."
    )
    return Lines(lines, text)


COEFFICIENTS = Picture("flash-coefficients", "FLASH: what its score is made of", "coefficient", _coefficients)
