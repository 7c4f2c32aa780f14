"""Which apps a SuperNode of fedstill runs: the one in its own folder, and no other."""

from __future__ import annotations

import io
import zipfile
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from fedstill.core.errors import FedstillError
from fedstill.deploy.flower.supernode import check_app, checked

FILES = {"pyproject.toml": '[project]\nname = "app"\n', "client_app.py": "app = 1\n", "server_app.py": "app = 2\n"}


@pytest.fixture
def installed(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "client_app.pyc").write_bytes(b"made by Python")
    return tmp_path


def bundle(*more, **changes):
    kept = io.BytesIO()
    with zipfile.ZipFile(kept, "w") as archive:
        for name, text in [*{**FILES, **changes}.items(), *more, (".info/CONTENT", "client_app.py,...")]:
            archive.writestr(name, text)
    return kept.getvalue()


def test_the_installed_app_is_run(installed):
    check_app(bundle(), installed)


def test_flower_may_write_the_project_in_other_words(installed):
    check_app(bundle(**{"pyproject.toml": "[project]\nname='app'"}), installed)


@pytest.mark.parametrize(
    "sent",
    [
        bundle(**{"client_app.py": "import os\n"}),
        bundle(**{"server_app.py": "app = 3\n"}),
        bundle(**{"pyproject.toml": '[project]\nname = "app"\ndependencies = ["evil"]'}),
        bundle(("more.py", "")),
        bundle(("sub/more.py", "")),
        b"no archive",
    ],
    ids=["changed", "server", "project", "more", "folder", "garbage"],
)
def test_another_app_is_refused(installed, sent):
    with pytest.raises((FedstillError, zipfile.BadZipFile)):
        check_app(sent, installed)


def test_a_file_that_is_named_twice_is_refused(installed):
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = bundle(("client_app.py", FILES["client_app.py"]))
    with pytest.raises(FedstillError, match="twice"):
        check_app(twice, installed)


def test_an_app_without_one_of_the_files_is_refused(installed):
    (installed / "more.py").write_text("")
    with pytest.raises(FedstillError, match=r"other files than the installed one: \['more.py'\]"):
        check_app(bundle(), installed)


def test_what_a_superlink_sends_is_checked_before_flower_has_it(installed):
    sent = {"good": bundle(), "bad": bundle(**{"client_app.py": "import os\n"})}

    @contextmanager
    def connect(address):
        yield (7, "receive", "send", "get_run", fetch, "pull", "push", "confirm")

    def fetch(name, run):
        return SimpleNamespace(content=sent[name])

    with checked(connect, installed, KeyError)("address") as parts:
        assert parts[:4] == (7, "receive", "send", "get_run")
        assert parts[5:] == ("pull", "push", "confirm")
        assert parts[4]("good", 1).content == sent["good"]
        with pytest.raises(KeyError, match="another client_app"):
            parts[4]("bad", 1)
