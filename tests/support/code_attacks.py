"""Attempts to run code through files that are data: experiment files, run folders, bundles, files beside them.

`attempts(folder, seed)` yields the name of each attempt and what came of it. Everything but one of HARMLESS is wrong.
Which names of code the files hold depends on the seed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import safetensors.torch
from typer.testing import CliRunner

import fedstill
from fedstill.cli import app
from fedstill.experiment.run_folder import _seal, contract_text
from fedstill.methods import own_code

ONE_LINE, WENT_ON, RAN = "one line", "carried on", "ran its code"
HARMLESS = {ONE_LINE, WENT_ON}
EVIL = """
from pathlib import Path
Path({sentinel!r}).write_text("ran")

from subprocess import run as imported

def {function}(*arguments, **options):
    raise SystemExit("the code of a stranger ran")
"""
SMALL = """
rounds = {rounds}
cohort = 2
partition = {{scheme = "iid", clients = 2}}
{lines}
"""


class Attacker:
    """Writes files of others into a folder, and looks whether their code has run."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw, self.folder = random.Random(seed), folder
        self.sentinel = folder / "sentinel"
        word = "".join(self.draw.choices("abcdefgh", k=8))
        self.module, self.function = f"m{word}", f"f{word[::-1]}"
        self.code = EVIL.format(sentinel=str(self.sentinel), function=self.function)
        (folder / f"{self.module}.py").write_text(self.code)
        package = folder / f"p{word}"
        package.mkdir()
        (package / "__init__.py").write_text(self.code)
        self.package = package.name
        self.names = [
            f"{self.module}.py:{self.function}",
            f"{self.module}:{self.function}",
            f"{folder / self.module}.py:{self.function}",
            f"{self.package}:{self.function}",
            f"{self.package}.part:{self.function}",
        ]
        fedstill.run(
            fedstill.Experiment(rounds=1, cohort=2, partition={"scheme": "iid", "clients": 2}, model=MODEL),
            run_dir=folder / "finished",
            pictures=False,
        )
        fedstill.export(folder / "finished", out=folder / "bundle.safetensors")

    @property
    def name(self) -> str:
        return self.draw.choice(self.names)

    def file(self, *lines: str, rounds: int = 1) -> Path:
        path = self.folder / "theirs.toml"
        path.write_text(SMALL.format(rounds=rounds, lines="\n".join(lines)))
        return path

    def run_with(self, key: str, value: str) -> Path:
        """Return a copy of the finished run that names code, with a right seal."""
        copy = self.folder / "theirs"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder / "finished", copy)
        section, _, name = key.partition(".")
        path = copy / "contract.json"
        tree = json.loads(path.read_text())
        del tree["seal"], tree["digest"]
        table = tree["experiment"]
        table[section] = value if not name else {**table[section], name: value}
        path.write_text(contract_text({**tree, "seal": _seal(tree)}))
        config = (copy / "config.toml").read_text()
        if name:
            config = re.sub(
                rf'(\n\[{section}\]\n.*?){name} = "[^"]*"', rf'\g<1>{name} = "{value}"', config, flags=re.DOTALL
            )
        else:
            config = re.sub(rf"^{section} = .*$", f'{section} = "{value}"', config, count=1, flags=re.MULTILINE)
        (copy / "config.toml").write_text(config)
        return copy

    def contract_of_theirs(self) -> Path:
        """Return a copy of the run whose contract alone names code."""
        copy = self.run_with("method.name", self.name)
        shutil.copyfile(self.folder / "finished" / "config.toml", copy / "config.toml")
        return copy

    def bundle(self) -> Path:
        """Return a bundle with a right digest that names a network of theirs."""
        data = (self.folder / "bundle.safetensors").read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        table = json.loads(header["fedstill.experiment"])
        table["model"] = {"name": self.name}
        header |= {"fedstill.experiment": json.dumps(table), "fedstill.digest": "0" * 64}
        whole = safetensors.torch.save(safetensors.torch.load(data), header)
        digest = hashlib.blake2b(whole, digest_size=32).hexdigest()
        path = self.folder / "theirs.safetensors"
        path.write_bytes(whole.replace(b"0" * 64, digest.encode(), 1))
        return path

    def choice(self, **changes: object) -> Path:
        """Return the folder of a tournament of theirs."""
        folder = self.folder / "tournament"
        folder.mkdir(exist_ok=True)
        experiment = self.file('model = {name = "mlp", hidden = [3]}').read_text()
        record = {"experiment": experiment, "budget": "100rounds", "methods": ["fedavg"], "without": [], "played": []}
        (folder / "choose.json").write_text(json.dumps({**record, **changes}))
        return folder

    def trusted_file(self) -> Path:
        """Return a file that the user has allowed, because she has read it: it imports a neighbour and a function."""
        (self.folder / "neighbour.py").write_text("WIDTH = 3\n")
        path = self.folder / "trusted.py"
        path.write_text(f"# {self.module}\nfrom subprocess import run\nimport neighbour\nfrom fedstill.methods.fedavg ")
        path.write_text(path.read_text() + "import fedavg\n\ndef mine():\n    return fedavg()\n")
        return path

    def bytecode(self, source: Path) -> None:
        """Put bytecode of other text beside a file, marked as never to be compared with it."""
        from importlib._bootstrap_external import _code_to_hash_pyc

        target = Path(importlib.util.cache_from_source(str(source)))
        target.parent.mkdir(exist_ok=True)
        code = compile(self.code + "\nWIDTH = 3\nmine = None\n", str(source), "exec")
        target.write_bytes(_code_to_hash_pyc(code, importlib.util.source_hash(source.read_bytes()), False))

    def came_of(self, act: Callable[[], object]) -> str:
        """Say what came of an attempt."""
        self.sentinel.unlink(missing_ok=True)
        for loaded in [name for name in sys.modules if self.module in name or name == "neighbour"]:
            del sys.modules[loaded]
        own_code.forget()
        outcome = WENT_ON
        try:
            answer = act()
            if hasattr(answer, "exit_code"):
                outcome = WENT_ON if answer.exit_code == 0 else self._of_output(answer)
        except fedstill.FedstillError as error:
            outcome = ONE_LINE if "\n" not in str(error) else f"several lines: {error}"
        except BaseException as error:
            outcome = f"traceback: {type(error).__name__}: {error}"
        return RAN if self.sentinel.exists() else outcome

    def _of_output(self, answer: object) -> str:
        if answer.exception is not None and not isinstance(answer.exception, SystemExit):
            return f"traceback: {type(answer.exception).__name__}: {answer.exception}"
        lines = answer.stderr.splitlines()
        return ONE_LINE if answer.exit_code == 2 and len(lines) == 1 else f"{answer.exit_code}: {lines}"


MODEL = {"name": "mlp", "hidden": [3]}


def run(file: Path, out: Path) -> object:
    """Do as `fedstill run`, without pictures, because drawing takes longer than all other work here."""
    return fedstill.run(fedstill.Experiment.from_toml(file), run_dir=out, pictures=False)


def command(*words: object) -> object:
    return CliRunner().invoke(app, [str(word) for word in words])


def attempts(folder: Path, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each attempt, and what came of it; all work in `folder`, which is empty before."""
    them = Attacker(folder, seed)
    small = 'model = {name = "mlp", hidden = [3]}'
    shell = f"touch {them.sentinel}"
    evil_over = f"over = ['model={{name=\"{them.name}\"}}']"

    def allowed(break_it: Callable[[Path], object], name: str = "mine") -> object:
        path = them.trusted_file()
        own_code.allow_always(path)
        own_code.forget()
        break_it(path)
        shutil.rmtree(folder / "mine", ignore_errors=True)
        return run(them.file(f'method = "trusted.py:{name}"', small), folder / "mine")

    cases: dict[str, Callable[[], object]] = {
        "an experiment's method": lambda: command("run", them.file(f'method = "{them.name}"', small)),
        "an experiment's method among others": lambda: command(
            "run", them.file(f'method = "fedavg until 1 then fedprox+{them.name}(mu=1)"', small, rounds=2)
        ),
        "a shell as the method": lambda: command(
            "run", them.file(f'method = {{name = "os:system", command = "{shell}"}}', small)
        ),
        "a shell in the text of the method": lambda: command(
            "run", them.file(f"""method = 'subprocess:getoutput(cmd="{shell}")'""", small)
        ),
        "an experiment's network": lambda: command("run", them.file(f'model = "{them.name}"')),
        "a prototype": lambda: command(
            "run", them.file(f'model = {{name = "mixed", prototypes = ["mlp", "{them.name}"]}}')
        ),
        "an evaluation": lambda: command("run", them.file(f'evaluate = "{them.name}"', small)),
        "an engine": lambda: command("run", them.file(f'engine = "{them.name}"', small)),
        "compared methods": lambda: command(
            "compare", them.file(f'compare = {{methods = ["fedavg", "{them.name}"]}}', small)
        ),
        "a sweep": lambda: command("sweep", them.file("[compare]", evil_over)),
        "a tournament": lambda: command("choose", them.file(f'method = "{them.name}"', small)),
        "a changed setting beside it": lambda: command(
            "run", them.file(f'method = "{them.name}"', small), "--set", "local.lr=0.1", "--seed", 3
        ),
        "a tournament of theirs": lambda: command(
            "resume", them.choice(experiment=f'method = "{them.name}"\n{small}\ncohort = 2\nrounds = 1')
        ),
        "methods of their tournament": lambda: command("resume", them.choice(methods=["fedavg", them.name])),
        "a text of methods of their tournament": lambda: command("resume", them.choice(methods=f"fedavg,{them.name}")),
        "resume their method": lambda: command("resume", them.run_with("method.name", them.name)),
        "resume their network": lambda: command("resume", them.run_with("model.name", them.name)),
        "resume their evaluation": lambda: command("resume", them.run_with("evaluate", them.name)),
        "resume their contract": lambda: command("resume", them.contract_of_theirs()),
        "predict with their network": lambda: command("predict", them.run_with("model.name", them.name), folder),
        "predict with their method": lambda: command("predict", them.run_with("method.name", them.name), folder),
        "predict with their contract": lambda: command("predict", them.contract_of_theirs(), folder),
        "export their network": lambda: command("export", them.run_with("model.name", them.name)),
        "predict with their bundle": lambda: command(
            "predict", them.bundle(), folder / "finished" / "curves.png", "--out", folder / "answers"
        ),
        "start from their run": lambda: command(
            "run",
            them.file(f'model = {{name = "mlp", hidden = [3], start = "{them.run_with("model.name", them.name)}"}}'),
        ),
        "start from their bundle": lambda: command(
            "run", them.file(f'model = {{name = "mlp", hidden = [3], start = "{them.bundle()}"}}')
        ),
        "show their run": lambda: command("show", them.run_with("method.name", them.name)),
        "report their run": lambda: command("report", them.run_with("method.name", them.name)),
        "list their runs": lambda: command("runs", them.run_with("method.name", them.name).parent),
        "their run in Python": lambda: fedstill.load_run(them.run_with("model.name", them.name)),
        "resume in Python": lambda: fedstill.resume_run(them.run_with("method.name", them.name)),
        "their file in Python": lambda: fedstill.Experiment.from_toml(them.file(f'method = "{them.name}"')),
        "their bundle in Python": lambda: fedstill.load(them.bundle()),
        "an allowed file that was edited": lambda: allowed(lambda path: path.write_text(path.read_text() + them.code)),
        "an allowed file whose neighbour was edited": lambda: allowed(
            lambda path: path.with_name("neighbour.py").write_text(them.code)
        ),
        "a function that an allowed file imports": lambda: allowed(
            lambda path: None, f"run(args='{shell}', shell=true)"
        ),
        "bytecode beside an allowed file": lambda: allowed(lambda path: them.bytecode(path)),
        "bytecode beside the neighbour of one": lambda: allowed(
            lambda path: them.bytecode(path.with_name("neighbour.py"))
        ),
        "a filter of their repository": lambda: run(them.file(small), folder / "filtered"),
        "a monitor of their repository": lambda: run(them.file(small), folder / "monitored"),
    }
    with chdir(folder):
        for name, act in cases.items():
            if "repository" in name:
                _repository(folder, shell, "filter" if "filter" in name else "monitor")
            yield name, them.came_of(act)


def _repository(folder: Path, shell: str, kind: str) -> None:
    """Make the folder a repository whose own settings name a program for `git status`."""
    shutil.rmtree(folder / ".git", ignore_errors=True)
    (folder / ".gitattributes").write_text("*.py filter=theirs\n")
    who = ("-c", "user.email=them", "-c", "user.name=them")
    for words in (("init", "-q"), ("add", ".gitattributes", "trusted.py"), (*who, "commit", "-qm", "theirs")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    key = "filter.theirs.clean" if kind == "filter" else "core.fsmonitor"
    subprocess.run(["git", "config", key, f"{shell}; cat"], cwd=folder, check=True)
    with (folder / "trusted.py").open("a") as file:
        file.write("# changed\n")
