"""Learning curves: accuracy by round, the mean over seeds as a line and its spread as a band."""

from __future__ import annotations

from fedstill.report.charts import ALL_POINTS, BANDS, LINE_COLOURS, MOST_POINTS, line_chart
from fedstill.report.panels import Panel, mean_line
from fedstill.report.panels.answer import reference_levels
from fedstill.report.runs import Runs


def panel(runs: Runs) -> Panel | None:
    lines = {
        method: points
        for method, each in runs.by_method.items()
        if (points := mean_line([run.series("accuracy") for run in each], scale=100, most=100))
    }
    if not lines:
        return None
    alone, pooled = reference_levels(runs)
    levels = {"pooled": pooled, "alone (mean)": alone, "target": runs.target}
    seeds = max(len(each) for each in runs.by_method.values())
    sentences = ["Accuracy on the test set, which no client trains on, after each evaluated round."]
    if seeds > 1:
        whose = "it" if len(lines) == 1 else f"the lines of the {BANDS} best methods"
        sentences.append(
            f"A line is the mean over seeds. The band around {whose} is one standard deviation on each side."
        )
    if (more := len(lines) - len(LINE_COLOURS)) > 0:
        others = "the other one is grey" if more == 1 else f"the other {more} are grey"
        sentences.append(
            f"The {len(LINE_COLOURS)} methods with the best last accuracies have colours; {others}. The boxes switch "
            "lines off and on."
        )
    if max(len(run.evaluated) for run in runs.all) > min(MOST_POINTS, ALL_POINTS // len(lines)):
        sentences.append("Lines go through evenly spaced rounds, not through all that were evaluated.")
    chart = line_chart(
        lines,
        x="round",
        y="test accuracy (%)",
        levels={name: 100 * level for name, level in levels.items() if level is not None},
        alt="Lines: test accuracy by round. After the last round: "
        + "; ".join(f"{method} {points[-1].y:.1f} %" for method, points in list(lines.items())[:10])
        + ".",
    )
    return Panel("How it learns", sentences, [chart])
