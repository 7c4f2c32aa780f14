"""The files around the code: two commands that do everything, pinned versions, nothing of one machine in any text."""

import os
import re
import shutil
import subprocess
import tomllib
from typing import Any

import pytest
import yaml
from doc_pages import ROOT

CONSTRAINTS = ROOT / "constraints.txt"
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def pinned() -> dict[str, str]:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(*extras: str) -> set[str]:
    wanted = list(project()["dependencies"])
    for extra in extras:
        wanted += project()["optional-dependencies"][extra]
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
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-flower.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@needs_make
@pytest.mark.parametrize(
    ("target", "extra", "last"), [("run", "[data,plots,report]", "fedstill compare"), ("test", "[dev]", "pytest")]
)
def test_a_fresh_checkout_makes_its_environment_first(target, extra, last, checkout):
    steps = make(target, folder=checkout)
    order = [next(i for i, step in enumerate(steps) if word in step) for word in ("-m venv", extra, last)]
    assert order == sorted(order)
    assert "-c constraints.txt" in steps[order[1]]


@needs_make
def test_flower_has_an_environment_of_its_own(checkout):
    (install,) = [step for step in make("test-flower", folder=checkout) if "pip" in step and "install" in step]
    assert install.startswith(".venv-flower/bin/python")
    assert "-c constraints-flower.txt" in install


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
    texts = [*ROOT.glob("*.*"), ROOT / "Makefile", ROOT / ".ci" / "run", *(ROOT / ".github").rglob("*.*")]
    for folder in ("docs", "examples", "tools", "benchmarks", "src", "tests"):
        texts += [
            path
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {".md", ".py", ".sh", ".toml", ".txt", ".json"}
        ]
    place = re.compile(r"(?<![\w.~/])/(?:work|home|root|Users|opt|mnt|scratch)/\w")
    for path in texts:
        if path.is_file() and path.name != ".git" and path.suffix != ".png":  # .git is a file in a worktree
            found = place.search(path.read_text(encoding="utf-8", errors="ignore"))
            assert found is None, f"{path.relative_to(ROOT)}: {found and found[0]}"


def test_the_version_is_the_same_in_every_file():
    version = project()["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version
    assert re.search(rf"^## {re.escape(version)}$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_workflow_tests_every_python_that_is_promised():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    tested = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    classified = [line.rpartition(" ")[2] for line in project()["classifiers"] if "Python :: 3." in line]
    first, end = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project()["requires-python"]).groups()
    assert tested == classified == [f"3.{minor}" for minor in range(int(first), int(end))]


@needs_make
def test_the_workflow_makes_targets_that_exist(checkout):
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    targets = re.findall(r"run: make (\S+)", workflow)
    assert {"lint", "unit", "test-wheel"} <= set(targets)
    assert all(make(target, folder=checkout) for target in targets)


@needs_make
def test_the_hooks_before_a_commit_run_the_tools_of_make_lint(checkout):
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    tools = [" ".join(word for word in hook["entry"].split() if not word.startswith("--")) for hook in hooks]
    linted = [step.removesuffix(" .").removesuffix(" --check") for step in make("lint", folder=checkout)]
    assert tools == [step for step in linted if step.startswith((".venv/bin/ruff", ".venv/bin/mypy"))]


@pytest.mark.parametrize("form", ["bug.yml", "method.yml"])
def test_an_issue_form_asks_for_something(form):
    fields = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / form).read_text(encoding="utf-8"))["body"]
    assert any(field.get("validations", {}).get("required") for field in fields)
