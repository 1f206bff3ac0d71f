"""The formats of quantized checkpoints: `interface` says what one is, `registry` lists them. This imports nothing."""
