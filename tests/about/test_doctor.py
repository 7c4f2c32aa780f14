"""Doctor looks for the packages that the library can use, all of them and no others."""

import re
import tomllib
from pathlib import Path

import fedstill
from fedstill.about import doctor
from fedstill.experiment.run_folder import EXTRAS

ROOT = Path(__file__).parents[2]
# where a package has another name in code
MODULES = {"pillow": "PIL", "dp-accounting": "dp_accounting", "vl-convert-python": "vl_convert"}


def declared() -> dict[str, tuple[str, ...]]:
    """The packages of every extra that users of fedstill install; docs and dev are for its authors."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {
        extra: tuple(re.match(r"[\w.-]+", line)[0] for line in lines)
        for extra, lines in extras.items()
        if extra not in ("docs", "dev")
    }


def test_doctor_looks_for_every_extra_that_can_be_installed():
    assert declared() == EXTRAS


def test_every_extra_is_used_by_the_library_and_told_in_the_quick_start():
    files = [path for path in Path(fedstill.__file__).parent.rglob("*.py") if path.name != "environment.py"]
    code, page = "\n".join(path.read_text() for path in files), (ROOT / "docs/quickstart.md").read_text()
    for extra, packages in EXTRAS.items():
        assert f"| `{extra}` |" in page
        for package in packages:
            module = MODULES.get(package, package)
            assert re.search(rf"(from|import) {module}\b|require_extra\([^)]*\"{module}\"|\"{module}\": \(", code), (
                package
            )


def test_what_is_missing_is_told_with_how_to_install_it(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda package: None)
    told = {check.name: check for check in doctor._extras()}
    assert set(told) == {f"extra {extra}" for extra in EXTRAS}
    assert told["extra text"].advice == "for tokenizers: pip install 'fedstill[text]'"
    assert not told["extra text"].required
