"""Answer one of ten questions with a picture.

    python examples/gallery/answer.py              lists the questions
    python examples/gallery/answer.py helps        runs the experiment, writes helps.svg and prints what it shows

An SVG needs Chromium or Chrome; `helps.html` as a second argument does without.
"""

import re
import sys
import tomllib
from pathlib import Path

import fedcohort as fc
from fedcohort.report import load_figures

QUESTIONS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text())


def answer(name: str, picture: Path, **smaller: int) -> str:
    """Run the experiment of a question, save its picture, and return what is established and what it shows."""
    asked = QUESTIONS[name]
    results = fc.compare(data="digits", quiet=True, **{**asked["compare"], **smaller})
    figure = load_figures(results.path)[asked["figure"]]
    figure.save(picture)
    verdict = " ".join(str(results).split("\n\n")[0].split())  # what is established, by terminal accuracy
    verdict = re.sub(r"(\w)- (?=\w)", r"\1-", verdict)  # a name that was broken at the end of a line
    return f"{verdict} {figure.sentence}"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        for name, asked in QUESTIONS.items():
            print(f"{name:14} {asked['question']}")
    else:
        print(answer(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else f"{sys.argv[1]}.svg")))
