"""Numbers that a method itself shows: pseudo-labels, everything that its server steps report, its privacy budget."""

from __future__ import annotations

from collections.abc import Sequence

from fedstill.privacy.statement import shown
from fedstill.report.charts import Chart, Point, line_chart, plain_names
from fedstill.report.panels import Panel, Table, mean_line
from fedstill.report.panels.answer import epsilon_of
from fedstill.report.runs import Run, Runs, list_of, number, table_of
from fedstill.report.statistics import listed

SERVER = "server/"  # how the names of numbers begin that server steps report
MOST = 8  # charts
KNOWN = {
    "pseudo_label_accuracy": ("pseudo-labels that are right (%)", 100.0),
    "pseudo_labels": ("pseudo-labels kept", 1.0),
    f"{SERVER}u": ("u_t, the weight of the clients' models", 1.0),
    f"{SERVER}teacher_agreement": ("rows on which teachers agree (%)", 100.0),
    f"{SERVER}distill_loss_before": ("student's loss before it learns", 1.0),
    f"{SERVER}distill_loss_after": ("student's loss after it learns", 1.0),
}


def panel(runs: Runs) -> Panel | None:
    names = {str(key) for run in runs.all for row in run.rows for key in row if str(key).startswith(SERVER)}
    keys = [key for key in KNOWN if key in names or not key.startswith(SERVER)] + sorted(names - KNOWN.keys())
    charts: list[Chart] = []
    constant: list[str] = []
    for key in keys:
        lines = {}
        for method, each in runs.by_method.items():
            words, scale = KNOWN.get(key, (key.removeprefix(SERVER).replace("_", " "), 1.0))
            points = mean_line([run.series(key) for run in each], scale=scale)
            if len(points) > 1:
                lines[method] = points
        values = {point.y for points in lines.values() for point in points}
        if len(values) == 1:
            constant.append(f"{words}: {values.pop():,.5g} in every round of {listed(list(lines))}.")
        elif lines and len(charts) < MOST:
            ends = "; ".join(f"{method} {points[-1].y:,.4g}" for method, points in list(lines.items())[:10])
            alt = f"Lines: {words} by round. Ends: {ends}."
            title = words if len(lines) > 1 else f"{words}: {next(iter(lines))}"
            named = plain_names([title], 80)[0]
            charts.append(line_chart(lines, x="round", y=words, title=named, alt=alt, height=160))
    if spent := {method: points for method, each in runs.by_method.items() if len(points := _spent(each)) > 1}:
        ends = "; ".join(f"{method} {points[-1].y:,.4g}" for method, points in list(spent.items())[:10])
        alt = f"Lines: epsilon by round. Ends: {ends}."
        charts.append(line_chart(spent, x="round", y="epsilon", title="epsilon spent", alt=alt, height=160))
    budgets = [(method, _budget(runs, method)) for method in runs.by_method]
    rows = [(method, *cells) for method, cells in budgets if cells]
    if not charts and not rows and not constant:
        return None
    sentences = list(constant)
    if charts:
        sentences.append("Some methods report numbers of their own. Lines are means over seeds.")
    if rows:
        sentences.append(
            "The table has the privacy budget of the seed that has spent most, and everything that its claim does not "
            "cover."
        )
    head = ("method", "epsilon", "delta", "protects", "not protected")
    return Panel(
        "What the methods show", sentences, charts, Table(head, rows, "Claims of privacy.", left=5) if rows else None
    )


def _spent(each: Sequence[Run]) -> list[Point]:
    """Return the epsilon by round, the mean over the seeds."""
    seeds = []
    for run in each:
        pairs = [list_of(pair) for pair in list_of(run.files["privacy.json"].get("spent"))]
        known = {number(pair[0]): number(pair[1]) for pair in pairs if len(pair) == 2}
        seeds.append({int(at): epsilon for at, epsilon in known.items() if at is not None and epsilon is not None})
    return mean_line(seeds)


def _budget(runs: Runs, method: str) -> tuple[str, ...]:
    """Return the claim of the seed that has spent most, in words; empty without a claim."""
    spent = [(epsilon, run) for run in runs.by_method[method] if (epsilon := epsilon_of(run)) is not None]
    if not spent:
        return ()
    epsilon, run = max(spent, key=lambda pair: pair[0])
    statement = run.files["privacy.json"]
    claim = table_of(statement["claims"][0])
    covered, uncovered = (
        ", ".join(map(str, list_of(names))) for names in (claim.get("covered"), statement.get("not_covered"))
    )
    return shown(epsilon), str(claim.get("delta")), f"one {claim.get('unit')}: {covered}", uncovered or "nothing"
