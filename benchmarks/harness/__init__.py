"""Timing protocol, tables and plots, roofline, layer sizes and variants that the benchmark suites share.
Called by benchmarks/suites; calls nothing.
"""
