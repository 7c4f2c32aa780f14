"""Measure the time that a live page takes from a run: the same run with and without `fedstill watch` and a reader.

    python tools/watch_cost.py --pairs 5 --out watch_cost.json -- --rounds 1000 --set partition.clients=1000 ...

The words after `--` are those of `fedstill run`. Runs with and without the page alternate, because machines are noisy.
On Linux the page's own processor seconds are counted, too, because other work on the machine hardly changes them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

FEDSTILL = [sys.executable, "-m", "fedstill"]


def read(address: str, sizes: list[int]) -> None:
    """Read the events of a page until it ends, as a browser does, and note the sizes of the pieces."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc)
    try:
        connection.request("GET", f"{parts.path}events")
        answer = connection.getresponse()
        while piece := answer.read1(65536):
            sizes.append(len(piece))
    except (OSError, http.client.HTTPException):
        pass


def seconds_of_run(words: list[str], folder: Path, *, watched: bool) -> dict[str, float]:
    """Run once, and return its seconds; with the page also its processor seconds and the bytes for its reader."""
    sizes: list[int] = []
    page = None
    if watched:
        page = subprocess.Popen([*FEDSTILL, "watch", str(folder)], stdout=subprocess.PIPE, text=True)
        address = page.stdout.readline().strip() if page.stdout else ""
        threading.Thread(target=read, args=(address, sizes), daemon=True).start()
        time.sleep(3)  # the page has loaded its libraries
    start, before = time.perf_counter(), 0.0 if page is None else processor_seconds(page.pid)
    subprocess.run([*FEDSTILL, "run", *words, "--quiet", "--out", str(folder)], check=True, stdout=subprocess.DEVNULL)
    seconds, spent = time.perf_counter() - start, 0.0
    if page is not None:
        spent = processor_seconds(page.pid) - before
        page.terminate()
        page.communicate()
    return {"seconds": seconds, "page_cpu_s": spent, "bytes": sum(sizes)}


def processor_seconds(process: int) -> float:
    """Return the processor seconds of a process and its threads; NaN on systems other than Linux."""
    try:
        numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    pairs: list[dict[str, float]] = []
    for number in range(given.pairs):
        with tempfile.TemporaryDirectory() as folder:
            first_watched = number % 2 == 1
            runs = {
                watched: seconds_of_run(given.words, Path(folder) / f"run-{watched}", watched=watched)
                for watched in (first_watched, not first_watched)
            }
        ratio = runs[True]["seconds"] / runs[False]["seconds"]
        pairs.append(
            {
                "alone_s": runs[False]["seconds"],
                "watched_s": runs[True]["seconds"],
                "ratio": ratio,
                "page_cpu_share": runs[True]["page_cpu_s"] / runs[True]["seconds"],
                "bytes": runs[True]["bytes"],
            }
        )
        given.out.write_text(json.dumps({"words": given.words, "pairs": pairs}, indent=1) + "\n")
        print(pairs[-1], flush=True)
    ratio, share = (statistics.median(pair[key] for pair in pairs) for key in ("ratio", "page_cpu_share"))
    print(f"median ratio {ratio:.3f}; the page took {100 * share:.1f} % of one core")


if __name__ == "__main__":
    main()
