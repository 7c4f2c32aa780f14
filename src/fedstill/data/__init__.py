"""Datasets and federations: load a source, give the server an unlabeled part, share the other rows out to clients."""

from fedstill.data.federation import federation_from_tensors, hold_client_tests, make_federation, scale_inputs
from fedstill.data.load import Listing, describe_datasets, from_csv, from_hf, from_tensors, load
from fedstill.data.source import Source, Unlabeled, owners, stratified_holdout
from fedstill.data.split import central_pool, hold_validation, limit_test, read_unlabeled, split_unlabeled, with_test_of
from fedstill.data.tokens import tokenise
from fedstill.storage.files import default_cache_dir

__all__ = [
    "Listing",
    "Source",
    "Unlabeled",
    "central_pool",
    "default_cache_dir",
    "describe_datasets",
    "federation_from_tensors",
    "from_csv",
    "from_hf",
    "from_tensors",
    "hold_client_tests",
    "hold_validation",
    "limit_test",
    "load",
    "make_federation",
    "owners",
    "read_unlabeled",
    "scale_inputs",
    "split_unlabeled",
    "stratified_holdout",
    "tokenise",
    "with_test_of",
]
