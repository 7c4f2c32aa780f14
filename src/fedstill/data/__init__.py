"""Datasets and federations: load a source, take an unlabeled part for the server, share the rest out to clients."""

from fedstill.data.cache import default_cache_dir
from fedstill.data.datasets import Listing, describe_datasets, from_csv, from_hf, from_tensors, load
from fedstill.data.federation import federation_from_tensors, make_federation
from fedstill.data.source import Source, owners, stratified_holdout
from fedstill.data.unlabeled import match_storage, split_unlabeled

__all__ = [
    "Listing",
    "Source",
    "default_cache_dir",
    "describe_datasets",
    "federation_from_tensors",
    "from_csv",
    "from_hf",
    "from_tensors",
    "load",
    "make_federation",
    "match_storage",
    "owners",
    "split_unlabeled",
    "stratified_holdout",
]
