"""Settings of vLLM for the tests beside it, which need it installed: `make test-vllm`.
Called by pytest; imports nothing of vLLM, whose settings are environment variables.
"""

import os
from importlib.util import find_spec
from pathlib import Path

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
