from __future__ import annotations

import pytest
import torch
from deployments import a_deployment, experiment, set_line, table

from fedstill.core.errors import FedstillError
from fedstill.core.types import Weights
from fedstill.deploy.folder import read_deployment
from fedstill.deploy.rehearsal import compared, rehearse
from fedstill.deploy.starter import Asked, write_deployment


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_rehearsal_with_a_process_a_site_ends_at_the_bits_of_the_simulation(tmp_path):
    deployment = a_deployment(tmp_path, "fedlmd+scaffold")
    set_line(deployment.site_folder("west") / "site.toml", "data", '""')
    before = files_of(deployment.folder)
    verdict = rehearse(deployment.folder, tmp_path / "copy", {}, rounds=2)
    assert verdict.different == ()
    assert verdict.invented == ("west",)
    assert [row["accepted"] for row in verdict.result.history.rows] == [3, 3]
    assert "EQUAL: all 4 tensors" in verdict.text()
    assert files_of(deployment.folder) == before


@pytest.mark.slow
def test_made_up_images_rehearse_too(tmp_path):
    form = {"source": "(at the sites)", "classes": ["a", "b"], "shape": [1, 4, 4], "mean": [0.5], "std": [0.25]}
    write_deployment(experiment("nowhere", data=form, rounds=1), Asked(("north", "south"), tmp_path / "dep", "a:1"))
    verdict = rehearse(tmp_path / "dep", tmp_path / "copy", {})
    assert (verdict.different, verdict.invented) == ((), ("north", "south"))


@pytest.mark.slow
def test_noise_from_the_sites_secrets_is_no_fault(tmp_path):
    test = table(tmp_path / "test.csv", 30, 9)
    own = {"source": str(tmp_path / "pilot.csv"), "label": "outcome", "drop": ["patient_id"], "test": str(test)}
    noisy = "dp_fedavg(trust='nobody', clip=1.0, noise_multiplier=8.0)"
    deployment = a_deployment(tmp_path, noisy, data=own, rounds=1)
    verdict = rehearse(deployment.folder, tmp_path / "copy", {})
    assert verdict.different
    assert verdict.as_meant
    assert "PLAYED: each site draws its noise from a secret of its own" in verdict.text()


def test_rows_of_a_site_that_cannot_be_read_are_named_with_the_site(tmp_path):
    deployment = a_deployment(tmp_path)
    (tmp_path / "south.csv").write_text("age,outcome\n1,ill\n2,well\n")
    with pytest.raises(FedstillError, match="site south: data: column 'sex' is missing"):
        rehearse(deployment.folder, tmp_path / "copy", {})


def test_rows_of_a_site_that_does_not_exist_are_refused(tmp_path):
    deployment = a_deployment(tmp_path)
    with pytest.raises(FedstillError, match="there is no site 'nord': sites are north, south, west"):
        rehearse(deployment.folder, tmp_path / "copy", {"nord": "x.csv"})
    assert read_deployment(deployment.folder) == deployment


def test_a_single_bit_makes_a_difference():
    ours, theirs = (Weights({"w": torch.tensor([1.0, 2.0])}, {"n": torch.zeros(1)}) for _ in range(2))
    assert compared(ours, theirs) == ((), 2, 0.0)
    theirs.params["w"][1] = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    different, count, largest = compared(ours, theirs)
    assert (different, count) == (("params/w",), 2)
    assert 0 < largest < 1e-6
