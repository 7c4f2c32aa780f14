"""Measure the time that a live page takes from a run: the same run with and without `fedstill watch` and a reader.

    python tools/watch_cost.py --pairs 5 --out watch_cost.json -- --rounds 1000 --set partition.clients=1000 ...

The words after `--` are those of `fedstill run`. Runs with and without the page alternate, because machines are noisy.
"""

from __future__ import annotations

import argparse
import http.client
import json
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
    """Run once, and return its seconds; with the page also the bytes that its reader was sent."""
    sizes: list[int] = []
    page = None
    if watched:
        page = subprocess.Popen([*FEDSTILL, "watch", str(folder)], stdout=subprocess.PIPE, text=True)
        address = page.stdout.readline().strip() if page.stdout else ""
        threading.Thread(target=read, args=(address, sizes), daemon=True).start()
        time.sleep(3)  # the page has loaded its libraries
    start = time.perf_counter()
    subprocess.run([*FEDSTILL, "run", *words, "--quiet", "--out", str(folder)], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    if page is not None:
        page.terminate()
        page.wait()
    return {"seconds": seconds, "bytes": sum(sizes)}


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
                "bytes": runs[True]["bytes"],
            }
        )
        given.out.write_text(json.dumps({"words": given.words, "pairs": pairs}, indent=1) + "\n")
        print(pairs[-1], flush=True)
    print(f"median ratio {statistics.median(pair['ratio'] for pair in pairs):.3f}")


if __name__ == "__main__":
    main()
