"""The public names: complete, sorted, and what they say they are."""

import subprocess
import sys
import typing
from pathlib import Path

import pytest

import fedstill


def test_all_is_sorted_and_without_repetition():
    assert fedstill.__all__ == sorted(set(fedstill.__all__))


@pytest.mark.parametrize("name", fedstill.__all__)
def test_every_public_name_is_there(name):
    assert getattr(fedstill, name).__name__ == name


def test_lazy_names_and_those_of_type_checkers_are_the_same(monkeypatch):
    for name in fedstill.__all__:  # whatever they import is imported before the world is turned upside down
        getattr(fedstill, name)
    monkeypatch.setattr(typing, "TYPE_CHECKING", True)
    seen = {}
    source = Path(fedstill.__file__).read_text(encoding="utf-8")
    exec(compile(source, fedstill.__file__, "exec"), seen)
    assert all(seen[name] is getattr(fedstill, name) for name in fedstill.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="fedavgg"):
        fedstill.fedavgg  # noqa: B018


def test_the_version_is_that_of_the_distribution():
    assert fedstill.__version__.count(".") == 2


def test_importing_the_package_and_its_help_does_not_import_torch():
    code = "import sys, fedstill, fedstill.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.slow
def test_a_quick_start_begins_without_importing_scikit_learn_or_scipy():
    """They take as long as torch; a run without noise on the embedded digits needs neither."""
    code = (
        "import sys, fedstill.experiment.run; from fedstill.data import load; load('digits'); "
        "sys.exit(bool({'sklearn', 'scipy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_documented_name_that_is_a_submodule_too_stays_the_public_one():
    submodules = {name for name in sys.modules if name.count(".") == 1 and name.startswith("fedstill.")}
    assert not {f"fedstill.{name}" for name in fedstill.__all__} & submodules
