"""The benchmark suites, a module with `main(argv)` per command of `python -m benchmarks`.
Called by benchmarks/__main__.py, which imports the chosen one alone; calls nothing.
"""
