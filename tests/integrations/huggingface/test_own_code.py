"""Models with code of their own: loading runs it only where asked to, saving takes it along, with the tokenizer.
Called by pytest.
"""

import json
import sys

import pytest
import torch
from tiny_models import tiny_config, tiny_model, tokens

from thunder_moe import load_checkpoint, quantize_, save_checkpoint
from thunder_moe.checkpoint import convert

CONFIGURATION = """
from transformers import Qwen3MoeConfig

class OwnConfig(Qwen3MoeConfig):
    model_type = "own_moe"
"""
MODELING = """
from transformers import Qwen3MoeForCausalLM
from .configuration_own import OwnConfig
from .extra import SCALE

class OwnForCausalLM(Qwen3MoeForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * SCALE
        return out
"""
FILES = {"configuration_own.py": CONFIGURATION, "modeling_own.py": MODELING, "extra.py": "SCALE = 3.0\n"}
AUTO_MAP = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


@pytest.fixture(scope="module")
def own_model(tmp_path_factory):
    """(directory of a converted checkpoint whose logits are three times those of Qwen3-MoE, these logits)."""
    root = tmp_path_factory.mktemp("own")
    model = tiny_model("qwen3_moe", torch.bfloat16)
    model.save_pretrained(root / "source")
    config = json.loads((root / "source" / "config.json").read_text())
    config |= {"model_type": "own_moe", "architectures": ["OwnForCausalLM"], "auto_map": AUTO_MAP}
    (root / "source" / "config.json").write_text(json.dumps(config))
    for name, text in {**FILES, "tokenizer.json": "{}", "LICENSE": "free"}.items():
        (root / "source" / name).write_text(text)
    convert(root / "source", root / "out")
    with torch.no_grad():
        return root / "out", quantize_(model)(tokens()).logits * 3.0


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Where transformers copies code that it runs; one place for all, because it stays in sys.modules."""
    utils = pytest.importorskip("transformers.dynamic_module_utils")
    folder = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            patch.delitem(sys.modules, name)
        patch.setattr(utils, "HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)
        yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def logits_of(model):
    with torch.no_grad():
        return model.eval()(tokens()).logits


def test_code_runs_only_where_asked_to(own_model, cache, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asks for permission"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_checkpoint(own_model[0])
    model = load_checkpoint(own_model[0], trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    assert torch.equal(logits_of(model), own_model[1])


def test_code_and_tokenizer_are_saved(own_model, cache, tmp_path):
    model = load_checkpoint(own_model[0], trust_remote_code=True)
    save_checkpoint(model, tmp_path / "saved")
    for name, text in {**FILES, "tokenizer.json": "{}", "LICENSE": "free"}.items():
        assert (tmp_path / "saved" / name).read_text() == text
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"] == AUTO_MAP
    again = load_checkpoint(tmp_path / "saved", trust_remote_code=True)
    assert torch.equal(logits_of(again), own_model[1])
    model.save_pretrained(tmp_path / "stock")  # as transformers': the code, no tokenizer
    assert {file.name for file in (tmp_path / "stock").iterdir()} >= {*FILES, "model.safetensors"}
    assert not (tmp_path / "stock" / "tokenizer.json").exists()


def test_a_known_architecture_has_its_own_class_without_trust(own_model, cache, tmp_path):
    """As DeepSeek-V3's repository, whose code transformers has, too."""
    model = quantize_(tiny_model("qwen3_moe", torch.bfloat16))
    save_checkpoint(model, tmp_path / "known")
    for name, text in FILES.items():
        (tmp_path / "known" / name).write_text(text.replace("    config_class = OwnConfig\n", ""))
    config = json.loads((tmp_path / "known" / "config.json").read_text())
    own = {"AutoModelForCausalLM": AUTO_MAP["AutoModelForCausalLM"]}
    (tmp_path / "known" / "config.json").write_text(json.dumps(config | {"auto_map": own}))
    loaded = load_checkpoint(tmp_path / "known")
    assert type(loaded).__name__ == "Qwen3MoeForCausalLM"
    assert torch.equal(logits_of(loaded) * 3.0, own_model[1])
    trusted = load_checkpoint(tmp_path / "known", trust_remote_code=True)
    assert type(trusted).__name__ == "OwnForCausalLM"
    assert torch.equal(logits_of(trusted), own_model[1])


def test_files_of_the_directory_that_a_model_came_from(tmp_path):
    from transformers import AutoModelForCausalLM

    tiny_model("qwen3_moe", torch.bfloat16).save_pretrained(tmp_path / "source")
    for name in ("tokenizer.model", "chat_template.jinja", "generation_config.json"):
        (tmp_path / "source" / name).write_bytes(b"\x00\xff" if name.endswith(".model") else b"{}")
    model = quantize_(AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16))
    model.generation_config.top_k = 7
    save_checkpoint(model, tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.model").read_bytes() == b"\x00\xff"
    assert (tmp_path / "saved" / "chat_template.jinja").exists()
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["top_k"] == 7
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) == 1
    tiny_config("mixtral").save_pretrained(tmp_path / "source")  # another model meanwhile
    save_checkpoint(model, tmp_path / "other")
    assert not (tmp_path / "other" / "tokenizer.model").exists()
