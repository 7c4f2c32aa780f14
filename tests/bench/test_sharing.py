"""The sharing service of a GPU runs while workers live, and is left alone where the user has one."""

import os

import pytest

from fedstill.bench import workers
from fedstill.bench.workers import CONTROL, PLACES, shared_gpu


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A stand-in for NVIDIA's program that writes down how it was called."""
    log, program = tmp_path / "log", tmp_path / CONTROL
    program.write_text(f'#!/bin/sh\necho "$@" "$(test "$1" = -d || cat)" in "$CUDA_MPS_PIPE_DIRECTORY" >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for place in PLACES:
        monkeypatch.delenv(place, raising=False)
    return log


def test_it_is_started_for_the_workers_and_ended_with_them(service):
    with shared_gpu(4, "cuda:0") as running:
        assert running
        folder = os.environ[PLACES[0]]
        assert os.path.isdir(folder)
    assert not any(place in os.environ for place in PLACES)
    assert not os.path.exists(folder)
    assert [line.split() for line in service.read_text().splitlines()] == [["-d", "in", folder], ["quit", "in", folder]]


def test_it_is_ended_when_the_work_fails(service):
    with pytest.raises(RuntimeError), shared_gpu(2, "cuda"):
        raise RuntimeError
    assert len(service.read_text().splitlines()) == 2
    assert not any(place in os.environ for place in PLACES)


@pytest.mark.parametrize(("jobs", "device"), [(1, "cuda"), (4, "cpu")])
def test_one_run_at_a_time_or_a_cpu_needs_none(service, jobs, device):
    with shared_gpu(jobs, device) as running:
        assert not running
    assert not service.exists()


def test_a_service_of_the_users_own_is_left_alone(service, monkeypatch):
    monkeypatch.setenv(PLACES[0], "/somewhere")
    with shared_gpu(4, "cuda") as running:
        assert not running
        assert os.environ[PLACES[0]] == "/somewhere"
    assert not service.exists()


def test_a_service_that_does_not_start_is_no_reason_to_stop(service):
    (service.parent / CONTROL).write_text("#!/bin/sh\nexit 1\n")
    with shared_gpu(4, "cuda") as running:
        assert not running


def test_it_is_ended_when_its_start_is_interrupted(service, monkeypatch):
    """Ctrl-C while the program starts: it may be running, and must not stay."""
    control = workers._control

    def interrupted(arguments, words=""):
        control(arguments, words)
        if arguments:
            raise KeyboardInterrupt

    monkeypatch.setattr(workers, "_control", interrupted)
    with pytest.raises(KeyboardInterrupt), shared_gpu(2, "cuda"):
        pass
    assert [line.split()[0] for line in service.read_text().splitlines()] == ["-d", "quit"]
    assert not any(place in os.environ for place in PLACES)
