"""The README's figures of FedAUX are those of the recorded runs, rounded."""

import json
import statistics

import pytest
from doc_pages import ROOT

CIFAR, ONE_SHOT, NEWS = "tiny-alpha-0.01-c-0.8", "tiny-shufflenet-alpha-0.01", "held-out-alpha-0.01-t20"


def accuracies(column: str, row: str) -> list[float]:
    runs = json.loads((ROOT / "docs/results/fedaux.json").read_text(encoding="utf-8"))["runs"]
    (found,) = (run["accuracy"] for run in runs if (run["column"], run["row"]) == (column, row))
    return found


def best(column: str, row: str) -> str:
    return f"{max(accuracies(column, row)):.0f}"


@pytest.mark.parametrize(
    ("words", "figures"),
    [
        ("{} % against {} on CIFAR-10", lambda: [best(CIFAR, "fedaux"), best(CIFAR, "feddf+p")]),
        ("falls to {} in the last ten", lambda: [f"{statistics.fmean(accuracies(CIFAR, 'fedaux')[-10:]):.0f}"]),
        ("{} against {} in a single round of Shuf", lambda: [best(ONE_SHOT, "fedaux"), best(ONE_SHOT, "feddf+p")]),
        ("{} against {} on AG News", lambda: [best(NEWS, "fedaux"), best(NEWS, "feddf+p")]),
        ("pre-trained FedAvg has {}", lambda: [best(NEWS, "fedavg+p")]),
    ],
)
def test_it_says_what_was_measured(words, figures):
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert words.format(*figures()) in readme
