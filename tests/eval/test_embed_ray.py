"""examples/embed_ray.py on a local Ray of two CPUs."""

import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from examples import load
from pictures import encoded, smooth

import vitfast

ray = pytest.importorskip("ray", reason="the extra `test` lacks Ray, 240 MB")
pytest.importorskip("ray.data", reason="ray[data]")


@pytest.fixture
def local_ray():
    """A Ray of this machine, whose workers take vitfast and the example from where the test has them."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(filter(None, [str(root), str(root / "examples"), os.environ.get("PYTHONPATH")]))
    options = dict(num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=100 << 20)
    ray.init(address="local", log_to_driver=False, runtime_env=dict(env_vars=dict(PYTHONPATH=paths)), **options)
    yield
    ray.shutdown()


@pytest.mark.long
def test_every_image_has_the_vector_of_the_embedder_or_an_error(local_ray, tmp_path):
    torch.manual_seed(0)
    shape = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)
    vitfast.ViT(**shape).save_pretrained(tmp_path / "weights")
    images = {f"{i:02}.jpg": encoded(smooth(i, 40 + 5 * i, 80), "JPEG") for i in range(20)}
    images["07.jpg"] = images["07.jpg"][:-60]
    (tmp_path / "photos" / "more").mkdir(parents=True)
    for name, content in images.items():
        (tmp_path / "photos" / ("more" if name > "15" else "") / name).write_bytes(content)
    flags = f"--weights {tmp_path}/weights --output {tmp_path}/vectors --gpus 0 --cpus 1 --batch-size 6 --normalize"
    load("embed_ray").main([f"{tmp_path}/photos", *flags.split()])
    table = pq.read_table(tmp_path / "vectors").sort_by("path").to_pylist()
    by_name = {Path(row["path"]).name: row for row in table}
    assert len(table) == 20 and by_name.keys() == images.keys()
    broken = by_name.pop("07.jpg")
    assert broken["vector"] is None and "07.jpg is a broken image" in broken["error"]
    truth = vitfast.Embedder(tmp_path / "weights", device="cpu", normalize=True)
    vectors = truth.embed([images[name] for name in by_name]).numpy()
    np.testing.assert_allclose([row["vector"] for row in by_name.values()], vectors, atol=1e-5, rtol=1e-5)
    assert {row["error"] for row in by_name.values()} == {None}
