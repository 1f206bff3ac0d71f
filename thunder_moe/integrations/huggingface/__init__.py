"""transformers models: experts modules, checkpoints, the quantizer of `from_pretrained`. Only this folder imports it.
Run by the first import of a module of this folder; calls transformers for its version, and nothing of ours.
"""

try:
    from transformers import __version__ as _version
except ImportError:
    _version = "0.0"
if tuple(map(int, _version.split(".")[:2])) < (5, 7):
    raise ImportError("thunder_moe.integrations needs transformers >= 5.7: pip install 'thunder_moe[transformers]'")
