"""The commands. Heavy imports stay inside them, so that help and messages about typing mistakes come at once."""

from __future__ import annotations

import inspect
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from fedstill.core.errors import FedstillError, in_one_line, own_place, printable, suggest

LAYOUT = "\n\t"  # signs of an answer that are not part of a name


class Format(StrEnum):
    """How an answer is printed."""

    text = "text"
    json = "json"


class OneLineErrors(TyperGroup):
    """Commands that print a mistake, typer's own included, in one line without a traceback."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except Exception as error:
            # typer brings its own copy of click since 0.20 or so: both kinds of usage error have this method.
            if hasattr(error, "format_message"):
                fail(_usage(error))
            if isinstance(error, FedstillError) and len(error.lines) > 1:
                fail(f"{len(error.lines)} mistakes:", *error.lines)
            if isinstance(error, FedstillError) or own_place(error):  # a file of the user, such as FILE.py:function
                fail(in_one_line(error))
            if isinstance(error, OSError):
                place = f"'{error.filename}': " if error.filename else ""
                fail(f"{place}{error.strerror or error}")
            raise
        sys.exit(code if isinstance(code, int) else 0)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise FedstillError(f"unknown command '{args[0]}': {suggest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def _usage(error: Any) -> str:
    """Say what is wrong with a command line and what to do: a key of the experiment file is no option."""
    message, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
    option = getattr(error, "option_name", "")
    key = option.lstrip("-").replace("-", "_")
    if key and context is not None and any("--set" in param.opts for param in context.command.params):
        from fedstill.experiment.config import Experiment

        if key.partition(".")[0] in Experiment.model_fields:
            return f"no option {option}, but a key of the experiment file: write --set {key}=VALUE"
    if getattr(error, "possibilities", None):
        return str(message)
    return f"{message}: see `{'fedstill' if context is None else context.command_path} --help`"


def fail(*lines: str) -> NoReturn:
    """Say what is wrong, a line each, and exit with 2."""
    tell("\n  ".join(" ".join(line.split()) for line in lines))
    sys.exit(2)


def tell(line: str) -> None:
    """A line for the person in front; stdout stays for answers."""
    print(f"fedstill: {printable(line, keep=LAYOUT)}", file=sys.stderr, flush=True)


def say(answer: str) -> None:
    """Print an answer, without signs that steer a terminal, because others may have named what it speaks of."""
    typer.echo(printable(answer, keep=LAYOUT))


class Ended(KeyboardInterrupt):
    """SIGTERM, as a scheduler, `timeout` or a container sends it: to be taken as Ctrl-C is."""


@contextmanager
def stoppable(how_to_go_on: Callable[[], str | None]) -> Iterator[None]:
    """Say how to go on when a user stops long work, and exit as shells expect: 130 after Ctrl-C, 143 after SIGTERM."""

    def end(number: int, frame: object) -> NoReturn:
        raise Ended

    alone = threading.current_thread() is threading.main_thread()  # no other thread may say what a signal does
    before = signal.signal(signal.SIGTERM, end) if alone else None
    try:
        yield
    except KeyboardInterrupt as stopped:
        if advice := how_to_go_on():
            tell(f"stopped; {advice}")
        raise typer.Exit(143 if isinstance(stopped, Ended) else 130) from None
    finally:
        if alone:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def print_json(answer: Any) -> None:
    say(json.dumps(answer, indent=2, allow_nan=False))


app = typer.Typer(
    cls=OneLineErrors,
    help="Federated learning on non-IID data by knowledge distillation.",
    epilog="Start with: fedstill compare (eight methods on embedded data, within a minute)",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

File = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="Experiment file (TOML); without it: the quick start.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key (local.lr=0.1) or a whole section; may be repeated."),
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder for the results (default: runs/<name>/<utc>-<hash>).")
]
References = Annotated[
    bool, typer.Option("--references", help="Also measure the majority class, each client alone, and all data pooled.")
]


def _allow_code(ctx: typer.Context, value: bool) -> bool:
    """Let code run that the files and folders of this command name, and print each with its digest."""
    if value:
        from fedstill.methods.own_code import allowing_code

        ctx.with_resource(allowing_code(tell))
    return value


AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", callback=_allow_code, help="Let code run that the file or the folder names; print its digest."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result and warnings only.")]
AsFormat = Annotated[Format, typer.Option("--format", help="text for people, json for programs.")]


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from importlib.metadata import version as version_of

        say(f"fedstill {version_of('fedstill')}")
        raise typer.Exit()
    if ctx.invoked_subcommand is None:
        say(ctx.get_help())
        raise typer.Exit()


def takes(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as its arguments and options; typer reads them from its signature."""

    def with_signature(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = inspect.signature(options, eval_str=True)  # type: ignore[attr-defined]
        return command

    return with_signature


@dataclass(frozen=True)
class RunOptions:
    """The words of `fedstill run`."""

    file: File = None
    seed: Annotated[int | None, typer.Option(metavar="S", help="Short for --set seed=S.")] = None
    rounds: Annotated[int | None, typer.Option(metavar="N", help="Short for --set rounds=N.")] = None
    device: Annotated[str | None, typer.Option(metavar="D", help="Short for --set engine.device=D.")] = None
    settings: Set = None
    references: References = False
    attack: Annotated[
        str | None, typer.Option(metavar="KIND", help="Some clients are hostile: sign:0.2, scale:20, backdoor ...")
    ] = None
    out: Out = None
    allow_code: AllowCode = False
    quiet: Quiet = False
    format: AsFormat = Format.text


@app.command()
def init(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A table, a folder of images by class, or texts.")],
    owner: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Who holds a row: a column, such as hospital; of files: folder1, folder2."),
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The classes: a column; of files: folder1, folder2, ...")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The file (default: <name of DATA>.toml).")] = None,
) -> None:
    """Look at data, say everything that is found, and write an experiment file that runs."""
    from fedstill.experiment.starter import write_starter

    for line in write_starter(data, owner=owner, label=label, out=out):
        say(line)


@app.command()
@takes(RunOptions)
def run(**words: Any) -> None:
    """Run one experiment: one method, one seed."""
    from fedstill.cli.run import run_command

    run_command(RunOptions(**words))


@dataclass(frozen=True)
class CompareOptions(RunOptions):
    """The words of `fedstill compare`."""

    methods: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Methods, with options if any: 'fedavg,fedprox(mu=0.1)'.")
    ] = None
    seeds: Annotated[int | None, typer.Option(metavar="N", help="Seeds a method.")] = None
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Runs at a time, on one device too.")] = None


@app.command()
@takes(CompareOptions)
def compare(**words: Any) -> None:
    """Run several methods with several seeds on the same data: one table, and pictures.

    If --out holds a comparison of this experiment, its table grows: only methods and seeds that it lacks are run.
    """
    from fedstill.cli.run import compare_command

    compare_command(CompareOptions(**words))


@dataclass(frozen=True)
class SweepOptions(RunOptions):
    """The words of `fedstill sweep`."""

    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,...",
            help="A key and its values; KEY=LOW..HIGH to search; method.KEY alone takes the method's own proposal.",
        ),
    ] = None
    search: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Let Optuna choose N points, and end hopeless ones early.")
    ] = None
    seeds: Annotated[int | None, typer.Option(metavar="N", help="Seeds a point.")] = None
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Runs at a time, on one device too.")] = None
    references: Annotated[bool, typer.Option("--references", hidden=True)] = False  # best.toml can have them


@app.command()
@takes(SweepOptions)
def sweep(**words: Any) -> None:
    """Try values of some keys, on rows that clients hold back: a table, a heat map, and how much each key matters.

    If --out holds a sweep over these keys, only values and seeds that it lacks are run.
    """
    from fedstill.cli.run import sweep_command

    sweep_command(SweepOptions(**words))


@dataclass(frozen=True)
class ChooseOptions(RunOptions):
    """The words of `fedstill choose`."""

    budget: Annotated[
        str, typer.Option(metavar="COST", help="All runs together: 30m, 2h, 2000rounds, 5GB or 8epsilon.")
    ] = "10m"
    methods: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Methods to try and to mix (default: all that can run).")
    ] = None
    without: Annotated[
        str | None,
        typer.Option(metavar="NEED,...", help="Refuse methods that need unlabeled, client_state, label_counts ..."),
    ] = None
    jobs: Annotated[int | None, typer.Option(min=1, metavar="N", help="Runs at a time, on one device too.")] = None
    references: Annotated[bool, typer.Option("--references", hidden=True)] = False  # the final comparison has them


@app.command()
@takes(ChooseOptions)
def choose(**words: Any) -> None:
    """Find the method for your data: a tournament of methods and mixtures under a budget, then a fair comparison."""
    from fedstill.cli.choose import choose_command

    choose_command(ChooseOptions(**words))


@app.command()
def table(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that compare named.")],
    form: Annotated[
        str, typer.Option("--format", metavar="text|markdown|csv|latex|json", help="LaTeX needs the package booktabs.")
    ] = "text",
) -> None:
    """Print the table of a comparison again, also for papers; nothing is run."""
    from fedstill.cli.recorded import table_command

    table_command(folder, form)


@app.command()
def figure(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that compare or run named.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="FILE.pdf, .svg or .png (default: FOLDER/curves.pdf).")
    ] = None,
    width: Annotated[float, typer.Option(metavar="INCHES", help="3.25 is one column of most papers, 6.75 two.")] = 3.25,
) -> None:
    """Draw the learning curves of a run or a comparison in a paper's column width; nothing is run."""
    from fedstill.cli.recorded import figure_command

    figure_command(folder, out=out, width=width)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to look.")] = Path("runs"),
    format_: AsFormat = Format.text,
) -> None:
    """List the runs and comparisons below a folder, newest first; of a comparison's own folder its runs."""
    from fedstill.cli.recorded import runs_command

    runs_command(folder, as_json=format_ is Format.json)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that run or compare named.")],
    format_: AsFormat = Format.text,
) -> None:
    """Say what a run or a comparison is, its result, and everything that left a party."""
    from fedstill.cli.recorded import show_command

    show_command(folder, as_json=format_ is Format.json)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="The folder of a run or a comparison.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    format_: AsFormat = Format.text,
) -> None:
    """Show the settings in which two runs or comparisons differ, and their results side by side."""
    from fedstill.cli.recorded import diff_command

    diff_command(first, second, as_json=format_ is Format.json)


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder that run or compare named.")],
    rounds: Annotated[int | None, typer.Option(metavar="N", help="Go on to N rounds instead.")] = None,
    allow_code: AllowCode = False,
    quiet: Quiet = False,
    format_: AsFormat = Format.text,
) -> None:
    """Go on with a run or a comparison; the result is that of an uninterrupted one."""
    from fedstill.cli.run import resume_command

    resume_command(run_dir, rounds, quiet=quiet, as_json=format_ is Format.json)


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that run named, or a bundle of export.")],
    inputs: Annotated[
        Path | None,
        typer.Argument(metavar="INPUTS", help="A folder of images or a table; without it: the run's unlabeled set."),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="last|best|targets", help="Who answers: a model (default: last), or the server's targets."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the files (default: RUN; of a bundle: here).")
    ] = None,
    allow_code: AllowCode = False,
    format_: AsFormat = Format.text,
) -> None:
    """Label unlabeled data with what a run has learnt: classes, probabilities, calibrated confidence."""
    from fedstill.cli.predict import predict_command

    predict_command(model, inputs, from_=from_, out=out, as_json=format_ is Format.json)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that run named.")],
    from_: Annotated[str, typer.Option("--from", metavar="last|best", help="Which model of the run.")] = "last",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write (default: RUN/bundle.safetensors).")
    ] = None,
    kind: Annotated[
        str, typer.Option("--format", metavar="bundle|onnx", help="A bundle for fedstill, or an ONNX file for others.")
    ] = "bundle",
    allow_code: AllowCode = False,
) -> None:
    """Write a trained model as one file that predict answers from without its data and its run, and a model card."""
    from fedstill.cli.predict import export_command

    export_command(run_dir, from_=from_, out=out, kind=kind)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of run, compare, sweep or choose.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page (default: report.html in the first folder).")
    ] = None,
    format_: AsFormat = Format.text,
) -> None:
    """Write one HTML page to decide from: the answer in words, charts, costs, parties; it needs no network."""
    from fedstill.cli.report import report_command

    report_command(folders, out, as_json=format_ is Format.json)


@app.command()
def watch(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|FOLDER...", help="Folders of run, compare, sweep or choose; they may not exist yet."
        ),
    ],
    port: Annotated[
        int | None, typer.Option(min=1024, max=65535, metavar="N", help="Port of the page (default: a free one).")
    ] = None,
) -> None:
    """Show the page of `report` while runs go on: rounds arrive by themselves; only this machine can open it."""
    from fedstill.cli.watch import watch_command

    watch_command(folders, port)


deploy = typer.Typer(
    cls=OneLineErrors, help="Runs between organisations: rows stay where they are.", pretty_exceptions_enable=False
)
app.add_typer(deploy, name="deploy")


@dataclass(frozen=True)
class DeployInitOptions:
    """The words of `fedstill deploy init`."""

    file: Annotated[Path, typer.Argument(metavar="FILE", help="Experiment file (TOML), tried in a simulation before.")]
    sites: Annotated[str, typer.Option("--sites", metavar="A,B,...", help="A name for each site.")]
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="A new folder.")] = Path("deployment")
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where sites reach the server.")] = "localhost:9092"
    seats: Annotated[
        int, typer.Option(min=0, metavar="N", help="Places for sites, also later ones (default: as many as named).")
    ] = 0
    contract: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Take classes, columns and scale from this run, not from the data."),
    ] = None
    settings: Set = None


@deploy.command("init")
@takes(DeployInitOptions)
def deploy_init(**words: Any) -> None:
    """Write a folder that an operator can read: what is agreed, who takes part, and a start script for each party."""
    from fedstill.cli.deploy import init_command

    init_command(DeployInitOptions(**words))


@deploy.command("rehearse")
def deploy_rehearse(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that deploy init wrote.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="NAME=PATH", help="Rows of a site; of others some are made up. May be repeated."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Fewer rounds than the experiment has.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep what was played in this new folder (default: nothing).")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Play the whole run on this machine, a process for each site, and compare it with a simulation bit for bit."""
    from fedstill.cli.deploy import rehearse_command

    rehearse_command(folder, data or [], rounds=rounds, out=out, quiet=quiet)


@deploy.command("run")
def deploy_run(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that deploy init wrote.")],
) -> None:
    """Run the deployment over Flower, or go on with it: starts what is not up, watches it, resumes it."""
    from fedstill.cli.deploy import run_command

    run_command(folder)


@app.command()
def site(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The site's folder, as the operator sent it.")],
    yes: Annotated[bool, typer.Option("--yes", help="Consent without a question; for scripts.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check the rows, show what would leave, and stop.")] = False,
) -> None:
    """Check this site's rows, show what would leave, ask for consent, and answer the server's orders."""
    from fedstill.cli.deploy import site_command

    site_command(folder, yes=yes, check=check)


@dataclass(frozen=True)
class BenchOptions:
    """The words of `fedstill bench`."""

    paper: Annotated[str, typer.Argument(metavar="PAPER", help="A name in benchmarks/, or the path of its folder.")]
    table: Annotated[str | None, typer.Option(metavar="N", help="Which table; without it they are listed.")] = None
    columns: Annotated[str | None, typer.Option(metavar="A,B,...", help="Columns of the table (default: all).")] = None
    methods: Annotated[str | None, typer.Option(metavar="A,B,...", help="Rows of the table (default: all).")] = None
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Seeds 0 to N - 1.")] = 1
    preset: Annotated[str | None, typer.Option(metavar="P", help="Where paper and released code differ.")] = None
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder that holds cifar10/, mnist/, ...")] = None
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Runs at a time, on one device too.")] = 1
    device: Annotated[str, typer.Option(metavar="D", help="auto, cpu or cuda.")] = "auto"
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Run folders (default: runs/bench/PAPER).")] = None
    results: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Results as data (default: docs/results/PAPER.json, if there).")
    ] = None
    settings: Set = None
    rerun_changed: Annotated[
        bool, typer.Option("--rerun-changed", help="Do recorded runs again whose code has changed since.")
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how long it would take, and stop.")] = False
    format: AsFormat = Format.text


@app.command()
@takes(BenchOptions)
def bench(**words: Any) -> None:
    """Reproduce a paper's table: run what is not done yet, set ours beside the paper's numbers."""
    from fedstill.cli.bench import bench_command

    bench_command(BenchOptions(**words))


@app.command("list")
def list_(
    group: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="aggregates, attacks, datasets, engines, evaluations, methods, metrics, models or partitions.",
        ),
    ],
    format_: AsFormat = Format.text,
) -> None:
    """List what can be named in an experiment file."""
    from fedstill.cli.info import list_text, listing

    entries = listing(group)
    print_json(entries) if format_ is Format.json else say(list_text(entries))


@app.command()
def explain(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="As compare takes it: fedaux, 'feddf(student.steps=20)+moon'.")
    ],
    format_: AsFormat = Format.text,
) -> None:
    """Say what a method does: equation, parts, options, needs, and what leaves a client."""
    from fedstill.about.explain import explain as explanation
    from fedstill.cli.info import explain_text

    facts = explanation(method)
    print_json(facts) if format_ is Format.json else say(explain_text(facts))


@app.command()
def allow(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.py...", help="Files of code that you have read.")],
) -> None:
    """Let experiment files, runs and bundles name the functions of your files, as these files are now."""
    from fedstill.methods.own_code import allow_always

    for file in files:
        for line in allow_always(file):
            typer.echo(f"allowed: {line}")


@app.command()
def doctor(format_: AsFormat = Format.text) -> None:
    """Check this machine: versions, device, extras, both engines; say what to do where something is missing."""
    from fedstill.about.doctor import as_json, examine, is_healthy
    from fedstill.cli.info import doctor_text

    checks = examine()
    print_json(as_json(checks)) if format_ is Format.json else say(doctor_text(checks))
    if not is_healthy(checks):
        raise typer.Exit(1)


def main() -> None:
    """The entry point of the `fedstill` command."""
    app(prog_name="fedstill")
