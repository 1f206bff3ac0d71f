"""Differential tests: random programs with grouped GEMMs, each run eagerly and through every compiler."""
