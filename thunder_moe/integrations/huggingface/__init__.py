"""transformers models: experts modules, checkpoints, the quantizer of `from_pretrained`. Only here is it imported.
Run by the first import of one of its modules: the one check that transformers is there, and new enough.
"""

try:
    from transformers import __version__ as _version
except ImportError:
    _version = "0.0"
if tuple(map(int, _version.split(".")[:2])) < (5, 7):
    raise ImportError("thunder_moe.integrations needs transformers >= 5.7: pip install 'thunder_moe[transformers]'")
