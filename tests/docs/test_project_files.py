"""The files around the code: two commands that do everything, pinned versions, nothing of one machine in any text."""

import os
import re
import shutil
import subprocess
import tomllib

import pytest
from doc_pages import ROOT

CONSTRAINTS = ROOT / "constraints.txt"
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def pinned() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def requirements(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return {normal(re.match(r"[\w.-]+", line)[0]) for line in wanted} - {"fedstill"}


def test_all_that_is_installed_for_run_and_test_is_pinned():
    assert requirements("data", "plots", "dev") <= pinned().keys()


def test_pins_are_plain_versions():
    """A local version such as 2.13.0+cpu is found on one machine only."""
    assert all(re.fullmatch(r"[\d.]+\w*", version) for version in pinned().values())


def make(*words: str, folder) -> list[str]:
    """What make would do, without doing it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    answer = subprocess.run(
        ["make", "--dry-run", *words], cwd=folder, capture_output=True, text=True, env=environment, check=True
    )
    return answer.stdout.splitlines()


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@needs_make
@pytest.mark.parametrize(
    ("target", "extra", "last"), [("run", "[data,plots]", "fedstill compare"), ("test", "[dev]", "pytest")]
)
def test_a_fresh_checkout_makes_its_environment_first(target, extra, last, checkout):
    steps = make(target, folder=checkout)
    order = [next(i for i, step in enumerate(steps) if word in step) for word in ("-m venv", extra, last)]
    assert order == sorted(order)
    assert "-c constraints.txt" in steps[order[1]]


@needs_make
@pytest.mark.parametrize("target", ["run", "test"])
def test_a_second_call_installs_nothing(target, checkout):
    environment = checkout / ".venv"
    environment.mkdir()
    for stamp in ("made", "for-run", "for-test"):
        (environment / stamp).touch()
    assert not [step for step in make(target, folder=checkout) if "pip" in step or "venv .venv" in step]


@needs_make
def test_changed_requirements_are_installed_again(checkout):
    environment = checkout / ".venv"
    environment.mkdir()
    for age, stamp in enumerate(("made", "for-run", "for-test")):
        (environment / stamp).touch()
        os.utime(environment / stamp, (1_000_000 + age, 1_000_000 + age))
    assert any("[dev]" in step for step in make("test", folder=checkout))


def test_the_automatic_check_is_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("make test")


def test_no_text_names_a_place_on_one_machine():
    """Absolute paths of homes and mounts; files that ship to everybody have no use for them."""
    texts = [*ROOT.glob("*.*"), ROOT / "Makefile", ROOT / ".ci" / "run"]
    for folder in ("docs", "examples", "tools", "benchmarks", "src", "tests"):
        texts += [
            path for path in (ROOT / folder).rglob("*") if path.suffix in {".md", ".py", ".toml", ".txt", ".json"}
        ]
    place = re.compile(r"(?<![\w.~/])/(?:work|home|root|Users|opt|mnt|scratch)/\w")
    for path in texts:
        if path.is_file() and path.suffix != ".png":
            found = place.search(path.read_text(encoding="utf-8", errors="ignore"))
            assert found is None, f"{path.relative_to(ROOT)}: {found and found[0]}"
