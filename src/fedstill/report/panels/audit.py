"""The audit: refused uploads, rounds without a new model, resumes, and files that are missing or damaged."""

from __future__ import annotations

import re
from collections import Counter

from fedstill.report import counted
from fedstill.report.panels import Panel, Table
from fedstill.report.runs import AUDIT_FILE, Runs, number

MOST = 12  # reasons and gaps in the table
RESUMED = re.compile(r"INFO resuming after round (\d+)$", re.MULTILINE)


def panel(runs: Runs) -> Panel:
    listed: Counter[tuple[str, str]] = Counter()
    clients: dict[tuple[str, str], set[object]] = {}
    records, resumed, uploads, rounds = 0, 0, 0, 0
    for method, each in runs.by_method.items():
        for run in each:
            for record in run.audit:
                key = method, str(record.get("reason", "no reason"))
                listed[key] += 1
                records += not record.get("note")
                clients.setdefault(key, set()).add(str(record.get("client")))
            resumed += len(RESUMED.findall(run.log))
            uploads += round(sum(number(row.get("cohort")) or 0 for row in run.rows))
            rounds += len(run.rows)
    sentences = [
        f"The server received {uploads:,} uploads in {rounds:,} rounds of {counted(len(runs.all), 'run')}. "
        + (f"It refused {records:,} of them or whole rounds ({AUDIT_FILE})." if records else "It refused none."),
        f"The logs name {counted(resumed, 'resume')}." if resumed else "No log names a resume.",
    ]
    if runs.gaps:
        sentences.append(f"{counted(len(runs.gaps), 'file or run')} could not be read in full:")
        sentences += [f"— {gap}" for gap in runs.gaps[:MOST]]
        if len(runs.gaps) > MOST:
            sentences.append(f"— and {len(runs.gaps) - MOST} more.")
    else:
        sentences.append("All files of all runs could be read.")
    rows = [
        (method, reason, f"{count:,}", f"{len(clients[method, reason]):,}")
        for (method, reason), count in listed.most_common(MOST)
    ]
    head = ("method", "reason", "times", "clients")
    return Panel(
        "The audit", sentences, table=Table(head, rows, "Records of the audit by reason.", left=2) if rows else None
    )
