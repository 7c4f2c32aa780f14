"""Forgetting: by how much the accuracies of the classes have fallen from their peaks, round by round."""

from __future__ import annotations

from fedstill.report.charts import line_chart
from fedstill.report.panels import Panel, mean_line
from fedstill.report.runs import Runs


def panel(runs: Runs) -> Panel | None:
    lines = {
        method: points
        for method, each in runs.by_method.items()
        if (points := mean_line([run.series("forgetting") for run in each], scale=100)) and len(points) > 1
    }
    if not lines:
        return None
    ends = sorted((points[-1].y, method) for method, points in lines.items())
    sentences = [
        "Forgetting is the mean over the classes of the best accuracy so far minus the accuracy now (after FedNTD, "
        "NeurIPS 2022). 0 means that no class is worse than it ever was."
    ]
    if len(ends) > 1:
        sentences.append(
            f"After the last round {ends[0][1]} forgets least ({ends[0][0]:.1f} points) and {ends[-1][1]} most "
            f"({ends[-1][0]:.1f} points)."
        )
    last_values = "; ".join(f"{method} {value:.1f}" for value, method in ends[:10])
    chart = line_chart(
        lines, x="round", y="forgetting (points)", alt=f"Lines: forgetting by round. Ends: {last_values}.", height=220
    )
    return Panel("What is forgotten", sentences, [chart])
