"""Measurements of what a number format costs a model: sensitivity.
Called by users and the command line; calls quantization and integrations. Nothing is imported here."""
