"""Write paper.md and its figure from the stored results: python paper/build.py.

Every number in the text is a name in braces in paper.in.md, computed here from bench/results.
"""

import json
from pathlib import Path

import matplotlib
import numpy as np
from scipy.stats import t as student

import fedcohort
from fedcohort.core.protocol import SELECTORS
from fedcohort_bench.benchmark.run import read_scores

matplotlib.use("svg")
HERE = Path(__file__).parent
RESULTS = HERE.parent / "bench" / "results"
OTHERS = ("fedjax", "fedlab", "flgo", "flower", "fluke", "pfl")


def gains():
    """Return by selector the mean gain over uniform selection, its 95% half-width over seeds, and the worst setting."""
    scores = read_scores(RESULTS / "benchmark_fashion_mnist.json")
    found = {}
    for line in scores.lines:
        # Settings in which this selector cannot differ, because it ignores time, count once.
        by_seed = np.mean([np.mean([line.gain[s] for s in kind], axis=0) for kind in line.kinds], axis=0)
        half = student.ppf(0.975, len(by_seed) - 1) * by_seed.std(ddof=1) / np.sqrt(len(by_seed))
        means = {setting: float(np.mean(values)) for setting, values in line.gain.items()}
        found[line.label] = (float(by_seed.mean()), float(half), min(means.values()))
    return scores, found


def speed():
    """Return how many times as fast fedcohort is as the fastest other simulator, in the three workloads."""
    peers = json.loads((RESULTS / "peers.json").read_text())

    def rate(work, side):
        return np.median([turn["rates"][side]["clock"] for turn in peers[work]["turns"]])

    return [rate(w, "fedcohort") / max(rate(w, other) for other in OTHERS) for w in ("W1", "W2", "W3")]


def draw(found):
    """Draw the mean gains with intervals, and the worst settings."""
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "fedcohort"  # the same file each time
    names = sorted(found, key=lambda name: found[name][0])
    mean, half, worst = (np.array([found[name][i] for name in names]) for i in range(3))
    figure, axes = plt.subplots(figsize=(6, 0.19 * len(names) + 0.9), layout="constrained")
    axes.errorbar(
        mean, range(len(names)), xerr=half, fmt="o", color="#1f6feb", markersize=4, label="mean, 95% interval"
    )
    axes.plot(np.maximum(worst, -15), range(len(names)), "|", color="#bc4c00", markersize=8, label="worst setting")
    axes.axvline(0, color="#8c959f", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("points of accuracy above uniform selection (worst cut off at -15)")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(HERE / "gains.svg", metadata={"Date": None})


def text():
    """Return the paper with its numbers."""
    scores, found = gains()
    low, high = min(speed()), max(speed())
    better = [name for name, (mean, half, _) in found.items() if mean - half > 0]
    values = {
        "version": fedcohort.__version__,
        "selectors": sum(SELECTORS.get(name).__module__.startswith("fedcohort.") for name in SELECTORS.names()),
        "settings": len(scores.settings),
        "seeds": len(scores.seeds),
        "compared": len(found),
        "better": len(better),
        "balanced": f"{found['balanced'][0]:.1f}",
        "balanced_half": f"{found['balanced'][1]:.1f}",
        "balanced_worst": f"{found['balanced'][2]:.1f}",
        "losing": sum(1 for mean, half, _ in found.values() if mean + half < 0),
        "slowest": f"{low:.1f}",
        "fastest": f"{high:.1f}",
    }
    return (HERE / "paper.in.md").read_text().format(**values)


if __name__ == "__main__":
    draw(gains()[1])
    (HERE / "paper.md").write_text(text())
