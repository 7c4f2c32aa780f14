"""A crew of Ray actors, on this machine or on a cluster. Ray pickles, so a cluster is as trusted as this process."""

from __future__ import annotations

import importlib.util
import logging
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fedstill.core.errors import FedstillError
from fedstill.population.scattered import Lost, Up
from fedstill.population.worker import Arrays, Failed, Kit, Worker

LOCAL = "local"  # the address of a cluster of this machine alone, which lasts as long as the run
KNOCK = 5.0  # seconds in which a cluster accepts a connection
_log = logging.getLogger("fedstill.run")


class Share(NamedTuple):
    """The share of its machine that an actor takes."""

    cpus: float = 1.0
    gpus: float | None = None  # None: all GPUs of the cluster, divided among its actors


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster; a connection that is there already is used, and stays."""
    if importlib.util.find_spec("ray") is None:
        raise FedstillError("engine.name = 'ray' needs Ray: pip install 'fedstill[ray]', or set it to 'spawned'")
    import ray

    if ray.is_initialized():
        yield ray
        return
    try:
        _knock(address)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Ray's own defaults to come
            how = {"include_dashboard": False} if address == LOCAL else {}
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **how)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FedstillError(
            f"cluster.address = '{address}': no Ray cluster answers ({first}): start one with `ray start --head`, or "
            f"set '{LOCAL}'"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raise an error at once where nobody listens, because Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "//" not in host:
        socket.create_connection((host, int(port)), KNOCK).close()


@contextmanager
def ray_crew(
    kit: Kit, rows: Arrays, *, count: int, address: str = LOCAL, share: Share | None = None
) -> Iterator[RayCrew]:
    """Start `count` actors, or as many as there is room for. The rows lie once in each machine's object store."""
    with connected(address) as ray:
        crew = RayCrew(ray, kit, rows, count, share or Share())
        try:
            yield crew
        finally:
            crew.close()


def room_for(ray: Any, count: int, share: Share) -> tuple[int, float]:
    """Return how many of `count` actors the cluster has room for, and the GPUs of each; none is refused."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = sum(machine.get("GPU", 0.0) for machine in machines)
    each = min(1.0, gpus / count) if share.gpus is None else share.gpus
    fits = [
        min(int(machine.get("CPU", 0.0) / share.cpus), int(machine.get("GPU", 0.0) / each + 1e-9) if each else count)
        for machine in machines
    ]
    if not sum(fits):
        raise FedstillError(
            f"an actor of cluster.cpus = {share.cpus:g} and {each:g} GPUs has room on no machine of the cluster "
            f"({sum(machine.get('CPU', 0.0) for machine in machines):g} CPUs and {gpus:g} GPUs in all): lower them"
        )
    if sum(fits) < count:
        _log.warning(
            "cluster.actors = %d: the cluster has room for %d, of %g CPUs and %g GPUs each",
            count, sum(fits), share.cpus, each,
        )  # fmt: skip
    return min(count, sum(fits)), each


class Actor:
    """A worker that is made with its first call, whichever it is, because Ray may have started the actor again."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._worker: Worker | None = None

    def begin(self, held: list[Any]) -> Any:
        return self._made(held).begin()

    def do(self, held: list[Any], task: str, common: Any, *piece: Any) -> Any:
        return self._made(held).do(task, common, *piece)

    def _made(self, held: list[Any]) -> Worker:
        if self._worker is None:
            import ray

            kit, rows = ray.get(held)
            self._worker = Worker(kit, rows, self._device)
        return self._worker


class RayCrew:
    """Workers that are Ray actors; see scattered.Crew."""

    def __init__(self, ray: Any, kit: Kit, rows: Arrays, count: int, share: Share) -> None:
        self._ray = ray
        self.size, gpus = room_for(ray, count, share)
        device = _device_of(kit.device, gpus)
        self._held = [ray.put(kit), ray.put(rows)]
        actor = ray.remote(Actor).options(
            num_cpus=share.cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=0,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(kit.threads)}},
        )  # fmt: skip
        self._actors = [actor.remote(device) for _ in range(self.size)]
        self._calls: dict[Any, tuple[int, bool]] = {}  # of each open call: the worker, and whether it was to begin
        self._ready: set[int] = set()
        for worker in range(self.size):
            self._begin(worker)

    def share(self, common: Any) -> Any:
        return self._ray.put(common)

    def ready(self) -> list[int]:
        return sorted(self._ready)

    def hand(self, worker: int, task: str, shared: Any, *piece: Any) -> None:
        self._ready.discard(worker)
        self._calls[self._actors[worker].do.remote(self._held, task, shared, *piece)] = worker, False

    def next(self, patience: float) -> tuple[int, Any] | None:
        if not self._calls:
            return None
        done, _ = self._ray.wait(list(self._calls), timeout=patience)
        if not done:
            return None
        worker, begins = self._calls.pop(done[0])
        try:
            result = self._ray.get(done[0])
        except deaths_of(self._ray) as error:
            if not begins:
                self._begin(worker)
            return worker, Lost(type(error).__name__)
        except self._ray.exceptions.RayError as error:  # it could not read what it was sent, as without fedstill
            raise FedstillError(
                f"an actor failed: {str(error).strip().splitlines()[-1]}: are all machines installed alike?"
            ) from None
        if begins and isinstance(result, Failed):
            raise FedstillError(*result.lines)
        self._ready.add(worker)
        return worker, Up(result) if begins else result

    def close(self) -> None:
        """End all actors."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._calls.clear()

    def _begin(self, worker: int) -> None:
        """Ask an actor to begin; unlike a task, this waits for an actor that is being started again."""
        call = self._actors[worker].begin.options(max_task_retries=-1).remote(self._held)
        self._calls[call] = worker, True


def _device_of(device: str, gpus: float) -> str:
    """Return the device of an actor: Ray shows it its own GPUs, which begin at number 0."""
    if device == "auto":
        return "auto" if gpus else "cpu"
    return device.partition(":")[0]


def deaths_of(ray: Any) -> tuple[type[Exception], ...]:
    """Return the errors that say that an actor, its machine or its result is gone."""
    known = ray.exceptions
    return (
        known.RayActorError, known.ActorUnavailableError, known.NodeDiedError, known.OutOfMemoryError,
        known.ObjectLostError, known.WorkerCrashedError,
    )  # fmt: skip
