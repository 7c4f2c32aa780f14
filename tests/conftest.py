"""What holds in every test: Hypothesis' examples, whose code may run, which pictures and whose log a run writes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings


def pytest_configure(config: pytest.Config) -> None:
    """Draw few examples in the quick run, and the same ones at each call, because then only a change makes it fail.

    `make test-all`, which does not leave out the mark `matrix`, draws more, and new ones at each call.
    """
    quick = "not matrix" in config.option.markexpr
    settings.register_profile("fedstill", max_examples=20 if quick else 100, deadline=None, derandomize=quick)
    settings.load_profile("fedstill")


@pytest.fixture(autouse=True, scope="session")
def state_of_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the secrets of tests' runs out of the user's own folder, in other processes too."""
    os.environ["FEDSTILL_STATE"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def allowed_nothing(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test an empty list of allowed code, and not the list of the person who runs the tests."""
    monkeypatch.setenv("FEDSTILL_CONFIG", str(tmp_path_factory.getbasetemp() / "no-code-is-allowed"))


@pytest.fixture
def pictures() -> None:
    """For tests that look at the pictures of a run's folder."""


@pytest.fixture(autouse=True)
def no_other_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of other tests draw none, because they take half a second; the room `report` draws them all."""
    if "pictures" not in request.fixturenames and request.path.parent.name != "report":
        for module in ("run", "compare"):
            monkeypatch.setattr(f"fedstill.experiment.{module}.draw_pictures", lambda *_, **__: [])


@pytest.fixture(autouse=True)
def no_log_left() -> Iterator[None]:
    """Take the log file of a run from its logger, which is one for the whole process."""
    yield
    logging.getLogger("fedstill.run").handlers.clear()
