"""Measurements of what a number format costs a model: sensitivity, divergence, conversion.
Called by users and the command line; calls quantization and integrations. Nothing is imported here."""
