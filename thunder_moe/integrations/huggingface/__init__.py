"""transformers models: experts modules, checkpoints, the quantizer of `from_pretrained`. Only here is it imported."""
