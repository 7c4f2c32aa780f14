"""Small datasets on disk, as people have them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from PIL import Image

from fedstill.core.errors import FedstillError

# tmp_path is shared by the examples of one test; a busy machine is no reason to fail
HYPOTHESIS = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
HUB_FEATURES = {"img": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog", "owl"]}}


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zs", "Zl", "Zp")), min_size=1, max_size=6)
NOT_A_NUMBER = WORDS.filter(lambda word: not any(c.isdigit() for c in word)).filter(
    lambda word: word.strip().lower() not in {"na", "n/a", "nan", "null", "inf", "+inf", "-inf", "infinity"}
)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def rows_of(source) -> tuple[torch.Tensor, list[str]]:
    """All inputs and the class name of each, train then test."""
    names = [source.train.classes[y] for y in torch.cat([source.train.y, source.test.y])]
    return torch.cat([source.train.x, source.test.x]), names


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def pictures(count: int, *, channels: int = 3, height: int = 5, width: int = 4, seed: int = 0) -> np.ndarray:
    """Random images as pillow sees them: (n, h, w, 3), or (n, h, w) for one channel."""
    shape = (count, height, width, channels) if channels > 1 else (count, height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_parquet(path: Path, columns: dict, features: dict | None = None) -> None:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    arrays = {
        name: pa.array([{"bytes": v, "path": None} for v in values], image)
        if isinstance(values[0], bytes)
        else pa.array(values)
        for name, values in columns.items()
    }
    table = pa.table(arrays)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def hub_folder(folder: Path, *, prefix: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Two train shards (4 + 3 rows) and a test file (2 rows); returns all pixels and labels in order."""
    pixels, labels = pictures(9), np.array([2, 0, 1, 1, 2, 0, 0, 2, 1])
    for shard, rows in enumerate((slice(0, 4), slice(4, 7))):
        columns = {"img": [png(p) for p in pixels[rows]], "label": labels[rows].tolist()}
        write_parquet(folder / f"{prefix}-{shard:05d}-of-00002.parquet", columns, HUB_FEATURES)
    columns = {"img": [png(p) for p in pixels[7:]], "label": labels[7:].tolist()}
    write_parquet(folder / "test-00000-of-00001.parquet", columns, HUB_FEATURES)
    return pixels, labels


def image_folder(root: Path, layout: dict[str, int], **look: int) -> dict[str, np.ndarray]:
    """layout: {'train/cat': 3, ...} files a folder; returns their pixels by folder."""
    written = {}
    for number, (folder, count) in enumerate(sorted(layout.items())):
        (root / folder).mkdir(parents=True)
        written[folder] = pictures(count, seed=number, **look)
        for i, pixels in enumerate(written[folder]):
            (root / folder / f"{i}.png").write_bytes(png(pixels))
    return written


def fails(call: Callable, *args, **options) -> str:
    """The error of a mistaken call, which must be one line."""
    with pytest.raises(FedstillError) as error:
        call(*args, **options)
    text = str(error.value)
    assert "\n" not in text
    return text
