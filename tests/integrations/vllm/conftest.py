"""Settings of vLLM for the tests beside it, which need it installed: `make test-vllm`.
Called by pytest; imports vLLM, whose settings are environment variables, for a fixture alone.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines run in the process of the test
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    # Processes that vLLM starts import what the tests do.
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)]),
}
if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """vLLM's groups of processes, with one in each: its parameters ask for their rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    place = tmp_path_factory.mktemp("groups") / "store"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{place}", backend="gloo")
        initialize_model_parallel()
        yield
    cleanup_dist_env_and_memory()


@pytest.fixture
def said(monkeypatch):
    """What the plugin warns of beside a layer."""
    from thunder_moe.integrations.vllm import graphs

    lines = []
    monkeypatch.setattr(graphs.logger, "warning_once", lambda *args: lines.append(args[0] % args[1:]))
    return lines
