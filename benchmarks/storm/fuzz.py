"""Damaged and hostile files, texts and messages: each is answered or refused in one line, in bounded memory and time.

    python benchmarks/storm/fuzz.py --count 100000 --seed 1
    python benchmarks/storm/fuzz.py --seed 1 --kind npz --first 17 --count 1    # one input again

Input number n of a kind follows from the seed alone. First come the hostile inputs made by hand, then damaged ones.
Workers play the inputs under a limit of address space. An input has escaped if anything but a FedstillError of one
line comes out, if data are returned that contradict themselves or that lay outside of the data's folder, if an
allocation fails, if the process dies, grows beyond 2 GB, or is busy for more than 10 seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from storm import inputs
from storm.inputs import KINDS, REFUSED, SECRET_GREY

from fedstill.core.errors import FedstillError
from fedstill.data import Source

ANSWERED, ESCAPED = "answered", "ESCAPED"
MOST_SECONDS, MOST_MEMORY = 10.0, 2 * 2**30
ROOM = 4 * 2**30  # of address space beside what the worker has at its start; a larger allocation fails
SILENCE = 600.0  # seconds without a word after which a worker is ended: far above the limit, because machines are busy


class Outcome(NamedTuple):
    """What came of one input."""

    kind: str
    name: str
    outcome: str  # "answered", "refused: one line" or "ESCAPED: ..."


def storm(seed: int, count: int, *, kind: str = "", first: int = 0, heavy: bool = True) -> Iterator[Outcome]:
    """Play so many inputs of one kind, or of all kinds in turn.

    heavy: with the hostile inputs that take a second to make.
    """
    kinds = [kind] if kind else list(KINDS)
    with tempfile.TemporaryDirectory(prefix="storm-") as place, warnings.catch_warnings():
        warnings.simplefilter("error")  # a number that does not fit is a warning of numpy
        folder = Path(place)
        inputs.PLACE[:] = [folder]
        inputs.run_files.cache_clear()
        inputs.secret_image(folder)
        for turn in range(first * len(kinds), first * len(kinds) + count):
            name, number = kinds[turn % len(kinds)], turn // len(kinds)
            yield _played(name, number, seed, folder / "case", heavy=heavy)


def _input(kind: str, number: int, seed: int, *, heavy: bool) -> tuple[str, bytes]:
    """Return the name and the content of an input."""
    made = KINDS[kind]
    hostile = {name: content for name, content in made.hostile().items() if heavy or name not in made.heavy}
    if number < len(hostile):
        return list(hostile.items())[number]
    chance, valid = random.Random(f"{seed} {kind} {number}"), dict(made.valid())
    small = {name: content for name, content in hostile.items() if len(content) < 100_000}
    source = small if small and chance.random() < 0.2 else valid
    name = chance.choice(list(source))
    damage, content = made.damage(chance, source[name], list(valid.values()))
    return f"damaged {name}: {damage}", content


def _played(kind: str, number: int, seed: int, folder: Path, *, heavy: bool) -> Outcome:
    name, content = _input(kind, number, seed, heavy=heavy)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        answer = KINDS[kind].read(content, name, folder)
        outcome = REFUSED if answer is REFUSED else (_wrong(answer) or ANSWERED)
    except FedstillError as error:
        outcome = _of_lines(error)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        outcome = f"{ESCAPED}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Outcome(kind, f"{number} {name[:80]}", outcome)


def _of_lines(error: FedstillError) -> str:
    lines = [line for line in error.lines if len(line.splitlines()) != 1 or not line.isprintable()]
    if lines:
        return f"{ESCAPED}: {len(lines[0].splitlines())} lines, or signs that steer a terminal: {lines[0][:100]!r}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return f"{ESCAPED}: it asked for more memory than there is"
        cause = cause.__cause__ or cause.__context__
    return REFUSED


def _wrong(answer: object) -> str:
    """Say why an answer contradicts itself; empty: it does not."""
    for x in inputs.samples_in(answer):
        if x.dtype.kind == "f" and not abs(x).max(initial=0.0) < float("inf"):
            return f"{ESCAPED}: samples that are not finite"
        if x.ndim == 4 and x.size and (x == SECRET_GREY).reshape(len(x), -1).all(1).any():
            return f"{ESCAPED}: an image from outside of the folder"
    if isinstance(answer, Source):
        for part in (answer.train, answer.test):
            if len(part.x) != len(part.y):
                return f"{ESCAPED}: {len(part.x)} samples and {len(part.y)} labels"
            if len(part.y) and not 0 <= int(part.y.min()) <= int(part.y.max()) < len(part.classes):
                return f"{ESCAPED}: labels outside of the classes"
    return ""


# ---- workers


def _work(options: argparse.Namespace) -> None:
    """Play inputs and say before and after each of them where this process stands."""
    import torch

    torch.set_num_threads(1)
    logging.disable()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    played = storm(options.seed, options.count, kind=options.kind, first=options.first)
    for turn in range(options.count):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        began = time.process_time()
        print(json.dumps({"turn": turn}), flush=True)
        outcome = next(played)
        seconds = time.process_time() - began
        if turn > 0 and seconds > MOST_SECONDS:  # the first turn also makes what the others share
            outcome = outcome._replace(outcome=f"{ESCAPED}: {seconds:.0f} seconds")
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
        if peak > MOST_MEMORY:
            outcome = outcome._replace(outcome=f"{ESCAPED}: {peak / 1e9:.1f} GB of memory")
        print(json.dumps({"turn": turn, "outcome": outcome, "seconds": seconds, "peak": peak}), flush=True)


def watched(kind: str, seed: int, first: int, count: int) -> Iterator[tuple[Outcome, float, int]]:
    """Play inputs of one kind in processes that may die, and yield (outcome, seconds, peak of memory in bytes)."""
    while count:
        words = ["--worker", "--kind", kind, "--seed", seed, "--first", first, "--count", count]
        command = [sys.executable, __file__, *map(str, words)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            open_turn, done = -1, 0
            while True:
                ready, _, _ = select.select([process.stdout], [], [], SILENCE)
                line = process.stdout.readline() if ready else ""
                if not line:
                    break
                message = json.loads(line)
                open_turn = message["turn"]
                if "outcome" in message:
                    done = open_turn + 1
                    yield Outcome(*message["outcome"]), message["seconds"], message["peak"]
            died = ready and done < count
            process.kill()
        if done < count:
            why = f"the process died ({process.returncode})" if died else f"more than {SILENCE:.0f} seconds"
            yield Outcome(kind, f"{first + done}", f"{ESCAPED}: {why}"), 0.0, 0
            done += 1
        first, count = first + done, count - done


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="inputs, of all kinds together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", default="", choices=["", *KINDS])
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.worker:
        _work(options)
        return 0
    kinds = [options.kind] if options.kind else list(KINDS)
    escaped, total = 0, Counter[str]()
    print(f"{'kind':<12}{'inputs':>8}{'answered':>10}{'refused':>10}{'escaped':>9}{'longest':>10}{'largest':>10}")
    for place, kind in enumerate(kinds):
        count = options.count // len(kinds) + (place < options.count % len(kinds))
        counts, longest, largest = Counter[str](), 0.0, 0
        for outcome, seconds, peak in watched(kind, options.seed, options.first, count):
            counts[outcome.outcome.partition(":")[0]] += 1
            longest, largest = max(longest, seconds), max(largest, peak)
            if outcome.outcome.startswith(ESCAPED):
                print(f"  {kind} {outcome.name}: {outcome.outcome}", flush=True)
        total += counts
        escaped += counts[ESCAPED]
        numbers = f"{counts[ANSWERED]:>10}{counts['refused']:>10}{counts[ESCAPED]:>9}"
        print(f"{kind:<12}{counts.total():>8}{numbers}{longest:>8.1f} s{largest / 1e9:>7.2f} GB", flush=True)
    print(f"{total.total()} inputs of seed {options.seed}: {escaped} escaped")
    return int(escaped > 0)


if __name__ == "__main__":
    sys.exit(main())
