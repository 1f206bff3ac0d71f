"""Which configuration of the CUDA GEMMs is chosen for a shape. Called by pytest; nothing is run."""

import json

import pytest
import torch

from thunder_moe.activations import SWIGLU
from thunder_moe.kernels.cuda import configs as cuda_configs
from thunder_moe.kernels.cuda.configs import GemmConfig, Point, candidates, choose_config, dense_candidates
from thunder_moe.kernels.specs import GemmSpec, Target, WeightSpec


def choose(rows, experts, features, k, swiglu=False, capability=(9, 0), layout="tiled_64x64"):
    """Return the configuration for a shape on a device of 132 multiprocessors."""
    n, target = features * (1 + swiglu), Target(torch.device("cuda", 0), 132, capability)
    activation = SWIGLU if swiglu else None
    return choose_config(
        GemmSpec(rows, experts, n, k, torch.bfloat16, WeightSpec(layout), target, activation=activation)
    )


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("layout", cuda_configs.LAYOUTS)
def test_each_layout_was_measured(layout, swiglu):
    """Measurements of benchmarks/suites/tune.py for one layout do not replace measurements of another."""
    rows = [point.rows for point, _ in cuda_configs._measured((9, 0), swiglu, layout)]
    assert len(rows) >= 24
    assert min(rows) == 1
    assert max(rows) >= 512


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_configurations_fit_the_device(capability):
    """Tiles of every configuration that can be chosen fit shared memory, and split K only as far as there is K."""
    available = (227 if capability == (9, 0) else 99) << 10  # 99: Ada and consumer Blackwell
    for rows in (1, 8, 64, 1000, 10_000, 262_144):
        for experts, features, k in ((1, 16, 16), (8, 28672, 4096), (128, 768, 2048), (512, 5120, 8192)):
            for swiglu in (False, True):
                live = min(rows, experts)
                point = Point(live, rows / live, features, k)
                layouts = cuda_configs.LAYOUTS if k % 64 == 0 and capability == (9, 0) else ("linear",)
                for layout in layouts:
                    found = candidates(point, swiglu, capability, layout)
                    chosen = choose(rows, experts, features, k, swiglu, capability, layout)
                    for config in (chosen, *found):
                        assert config.layout == layout
                        assert config.kernel != "wgmma" or capability == (9, 0)
                        assert config.shared_bytes <= available
                        assert config.threads <= (512 if layout == "linear" else 640)
                        assert config.depth % 2 == 0 or config.kernel != "split"
                        assert config.row_blocks == 2 or not swiglu
                        if layout == "linear":
                            assert config.warps_k <= max(1, k // 128)
                        else:
                            assert config == config.fitted(k)
                            assert config.warps_k * 64 <= max(64, k)
                            assert config.stages >= (2 if config.kernel == "tiled_cluster" else 3)
                            assert config.serves(experts, k)
                            assert config.splits <= 8  # blocks of a portable cluster


def test_one_weight_alone_takes_clusters():
    """Groups do not take clusters, not even a single row of one group, nor does a K that the warpgroups cannot
    share."""
    for rows in (1, 8, 64, 96, 128, 256):
        config = choose(rows, 1, 5120, 2048)
        assert config.kernel == "tiled_cluster"
        assert config in dense_candidates(rows, 5120, 2048, (9, 0), "tiled_64x64")
        assert choose(rows, 1, 5120, 64).serves(1, 64)
        assert choose(rows, 128, 5120, 2048).kernel != "tiled_cluster"
        assert choose(rows, 1, 5120, 2048, swiglu=True).kernel != "tiled_cluster"
    # 600 rows would be 160 clusters of the fastest configuration at 512 rows; only 132 run at once.
    assert choose(512, 1, 5120, 2048).kernel == "tiled_cluster"
    assert choose(600, 1, 5120, 2048).kernel == "tiled_wgmma"
    assert not any(config.kernel == "tiled_cluster" for config in candidates(Point(1, 1.0, 5120, 2048), False, (9, 0)))


@pytest.mark.parametrize(("n", "k"), [(2880, 4096), (512, 2048), (4096, 14336), (768, 2048)])
def test_blocks_of_a_weight_that_was_not_measured_run_at_once(n, k):
    measured = cuda_configs._measured((9, 0), False, "tiled_64x64")
    assert not any((at.features, at.k) == (n, k) for at, config in measured if config.kernel == "tiled_cluster")
    for rows in (1, 16, 60, 100, 250):
        config = choose(rows, 1, n, k)
        tiles = -(-rows // (8 * config.token_blocks)) * -(-n // config.tile_features(False))
        assert config.kernel == "tiled_cluster"
        assert tiles <= cuda_configs._CLUSTERS[config.splits - 1]
        assert tiles * config.splits >= min(60, n // 64 * 6)
    # More tiles than that, and many rows, take what was measured of other kernels.
    assert choose(64, 1, 64 * 1000, k).kernel != "tiled_cluster"
    assert choose(4096, 1, n, k).kernel == "tiled_wgmma"


def test_a_configuration_is_fitted_to_k():
    mma, wgmma = GemmConfig("tiled_mma", 1, 1, 1, 4, 4, True), GemmConfig("tiled_wgmma", 6, 1, 4, 1, 4)
    assert mma.fitted(1 << 20) == mma
    assert mma.fitted((1 << 20) + 64) == GemmConfig("tiled_mma", 1, 1, 1, 4, 4, False)
    assert wgmma.fitted(512) == wgmma
    assert wgmma.fitted(384).depth == 2
    cluster = GemmConfig("tiled_cluster", 8, 1, 1, 2, 4, splits=3)
    assert cluster.fitted(2048) == cluster
    assert cluster.fitted(64 * 2 * 6).depth == 2
    assert cluster.serves(1, 64 * 2 * 6)
    assert not cluster.serves(1, 64 * 7)  # two warpgroups along K
    assert not cluster.serves(1, 64 * 2)  # three blocks
    assert not cluster.serves(2, 2048)


def test_the_nearest_measured_point_decides(tmp_path, monkeypatch):
    file = tmp_path / "configs.json"
    few, many = ["split", 1, 1, 4, 2, 4], ["wgmma", 16, 2, 2, 1, 4]
    entries = [
        dict(capability=[9, 0], swiglu=False, point=[8, 1.0, 1536, 2048], config=few),
        dict(capability=[9, 0], swiglu=False, point=[128, 64.0, 1536, 2048], config=many),
        dict(capability=[9, 0], swiglu=True, point=[8, 1.0, 768, 2048], config=["split", 2, 2, 4, 2, 2]),
    ]
    file.write_text(json.dumps(dict(entries=entries)))
    monkeypatch.setattr(cuda_configs, "MEASURED", file)
    cuda_configs._measured.cache_clear()
    shape = dict(features=1536, k=2048, layout="linear")
    assert choose(8, 128, **shape) == GemmConfig(*few)
    assert choose(128 * 40, 128, **shape) == GemmConfig(*many)
    assert choose(8 * 8, 8, **shape) == GemmConfig(*few)
    assert choose(8 * 9, 8, **shape) == GemmConfig(*many)  # nearer to `few`, which would take two tiles
    assert choose(8, 128, **{**shape, "k": 128}) == GemmConfig(*many)  # `few` has two warps along K
    assert choose(8, 128, **{**shape, "capability": (8, 0)}).kernel == "split"  # by rule
    cuda_configs._measured.cache_clear()
