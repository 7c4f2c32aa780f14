"""What accuracy costs: bytes and seconds, and the rounds, bytes and seconds until a target is reached."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedstill.report import human_bytes
from fedstill.report.charts import line_chart
from fedstill.report.panels import Panel, Table, mean_line, percent
from fedstill.report.runs import DOWN, UP, Run, Runs

NEAR = 0.95  # without a target: this share of the best method's last accuracy

AXES = (((*UP, *DOWN), 1e-6, "sent and received by clients so far (MB)"), (("seconds",), 1.0, "seconds so far"))


def panel(runs: Runs) -> Panel | None:
    known = {method: [run for run in each if run.evaluated] for method, each in runs.by_method.items()}
    known = {method: each for method, each in known.items() if each}
    if not known:
        return None
    charts = []
    for keys, scale, x in AXES:
        lines = {}
        for method, each in known.items():
            places = [{at: scale * value for at, value in run.summed(*keys).items()} for run in each]
            lines[method] = mean_line([run.series("accuracy") for run in each], at=places, scale=100, most=100)
        lines = {method: points for method, points in lines.items() if points}
        if lines and any(points[-1].x > 0 for points in lines.values()):
            ends = "; ".join(
                f"{method} {points[-1].y:.1f} % at {points[-1].x:,.2f}" for method, points in lines.items()
            )
            charts.append(line_chart(lines, x=x, y="test accuracy (%)", alt=f"Lines: accuracy by {x}. Ends: {ends}."))
    target, why = runs.target, "the target of the experiment file"
    if target is None:
        best = next(iter(known.values()))
        target, why = (
            NEAR * statistics.fmean(run.evaluated[-1]["accuracy"] for run in best),
            (f"{100 * NEAR:.0f} % of the best method's last accuracy, because the experiment file has no target"),
        )
    rows = [(method, *_until(each, target)) for method, each in known.items()]
    head = ("method", "runs that reach it", "rounds", "sent and received", "seconds")
    sentences = [
        f"Until {percent(target)} test accuracy is reached: {why}. Numbers are means over the runs that reach it.",
        "Bytes are the sizes of the models and numbers that clients exchange with the server, without compression. "
        "Seconds are of this machine, with all clients on it.",
    ]
    return Panel("What it costs", sentences, charts, Table(head, rows, f"Cost until {percent(target)}."))


def _until(each: Sequence[Run], target: float) -> tuple[str, str, str, str]:
    there = [(run, at) for run in each if (at := run.reached(target)) is not None]
    reach = f"{len(there)} of {len(each)}"
    if not there:
        return reach, "never", "never", "never"
    rounds = statistics.fmean(at for _, at in there)
    exchanged = statistics.fmean(run.summed(*UP, *DOWN)[at] for run, at in there)
    seconds = statistics.fmean(run.summed("seconds")[at] for run, at in there)
    return reach, f"{rounds:.1f}".removesuffix(".0"), human_bytes(exchanged), f"{seconds:.1f}"
