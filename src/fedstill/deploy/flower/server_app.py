"""The app that a SuperLink starts for a run: it plays the deployment's rounds over Flower into the run's folder."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

from fedstill.core.errors import FedstillError
from fedstill.deploy.flower.files import DEPLOYMENT, server_folder
from fedstill.storage.files import lock, write_whole

ALIVE_FILE = ".server-app"  # in server/flower; held as a lock while a ServerApp plays
OUTCOME_FILE = "outcome.json"  # beside it: how the last ServerApp ended, if it was not killed
ERROR_FILE = "server-app-error.txt"  # where in the code it ended


def server_app() -> Any:
    """Return Flower's ServerApp of a deployment."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator, unused-ignore]
    def main(grid: Any, context: Any) -> None:
        if DEPLOYMENT not in os.environ:
            raise FedstillError(f"the SuperLink was started without {DEPLOYMENT}: start it by superlink.sh")
        play(Path(os.environ[DEPLOYMENT]).resolve(), grid)

    return app


def play(folder: Path, grid: Any) -> None:
    """Play the rounds that are left, and write down how it ended."""
    from fedstill.core.population import Stay
    from fedstill.deploy.flower.keys import pem_of
    from fedstill.deploy.flower.transport import Gone, OverFlower
    from fedstill.deploy.folder import read_deployment
    from fedstill.deploy.server import federate_over

    notes = server_folder(folder)
    with lock(notes / ALIVE_FILE, wait=False):
        try:
            deployment = read_deployment(folder)
            client_of = {pem_of(member.public_key): member.client for member in deployment.members}
            transport = OverFlower(grid, client_of, deadline=deployment.deadline, names=deployment.names)
            always = {member.client for member in deployment.members if member.stay == Stay()}
            transport.wait_for(always, deployment.deadline)
            federate_over(deployment, transport, run_dir=deployment.run_dir, resume=True)
        except Exception as error:
            reason = str(error) if isinstance(error, FedstillError) else f"{type(error).__name__}: {error}"
            outcome = {"finished": False, "again": isinstance(error, Gone), "reason": reason}
            write_whole(notes / ERROR_FILE, traceback.format_exc())
            write_whole(notes / OUTCOME_FILE, json.dumps(outcome))
            raise
        write_whole(notes / OUTCOME_FILE, json.dumps({"finished": True}))
